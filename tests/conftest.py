"""Makes Megatron importable on CPU before any test imports it."""

import warnings

warnings.filterwarnings("ignore")

from megatron_pulse.integration import compat  # noqa: E402

compat.install()
