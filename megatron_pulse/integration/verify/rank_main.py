"""``python -m megatron_pulse.integration.verify.rank_main FOLDER``: one rank of a verification."""

import sys
import warnings
from pathlib import Path

from megatron_pulse.processes import without_collecting

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    with without_collecting():
        from megatron_pulse.integration.megatron import compat

        compat.install()  # before any import of Megatron
        from megatron_pulse.integration.verify.layout_rank import main
    sys.exit(main(Path(sys.argv[1])))
