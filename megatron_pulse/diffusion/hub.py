"""``hf:ID[@revision]`` as a folder of a pipeline or of weights, and uploads to the hub.

Such words of a command line are replaced by local folders before anything reads them. The folders
lie in the cache of huggingface_hub, which downloads only the files that the flag needs. Only one
process downloads: ``pulse`` itself or a sole rank. Each of several ranks only looks into the cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

_FOLDER = re.compile(r"((?:[^=]*=)*)(diffusers:)?(hf:.+)")
"""Pattern of a value: prefix with flag or name, optional ``diffusers:``, and ``hf:`` reference."""
HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_COMPONENT = ("config.json", "diffusion_pytorch_model*")
_BACKBONE = ("model_index.json", *_COMPONENT, "unet/*", "transformer/*", "scheduler/*", "README.md")
_PIPELINE = ("model_index.json", "text_encoder*/*", "tokenizer*/*", "vae/*")
_WHOLE = (*_PIPELINE, "README.md", "scheduler/*", "*encoder/*", "*extractor/*", "*checker/*")
_NEEDS = {
    "--from": _BACKBONE,
    "--controlnet": _COMPONENT,
    "--vae": _COMPONENT,
    "--config": ("model_index.json", "*config.json", "scheduler/*"),
    "--pipeline": _WHOLE,
    "--encoders": _PIPELINE,
    "--pulse-encoders": _PIPELINE,
    "encoders": _PIPELINE,  # of the command 'data encoders'
}
"""Flags that name such folders, and the file patterns that each flag needs."""
_FOREIGN = ("*.msgpack", "*.onnx*", "*.ckpt", "*openvino*", "*.h5", "*.pb")
_SECOND_CHOICE = ("*.fp16.*", "*.bf16.*", "*.non_ema.*", "*.bin", "*.pth")
"""Weights stored beside other formats, needed only if no other weights are there."""


def with_local_folders(
    words: Sequence[str], *, download: bool = True
) -> tuple[list[str], list[str]]:
    """Replace each ``hf:ID[@revision]`` that a flag takes by its local folder.

    Without ``download`` only the cache is searched. Returns the new words and the faults.
    """
    found: list[str] = []
    faults: list[str] = []
    before = ""
    for word in words:
        flag = word.partition("=")[0] if word.startswith("--") and "=" in word else before
        before = word
        parts = []
        for part in word.split(","):  # base=DIR,upper=DIR
            match = _FOLDER.fullmatch(part)
            needs = _BACKBONE if match and match[2] else _NEEDS.get(flag)
            if match and needs:
                try:
                    part = f"{match[1]}{match[2] or ''}{_folder(match[3], needs, download)}"
                except ValueError as error:
                    faults.append(f"{flag} {error}" if flag.startswith("--") else str(error))
            parts.append(part)
        found.append(",".join(parts))
    return found, faults


def push_faults(name: str) -> list[str]:
    """Faults that prevent an upload to the repository ``name``, before anything is exported."""
    from huggingface_hub import constants, get_token

    faults = [] if HUB_NAME.fullmatch(name) else [f"--push {name}: write OWNER/NAME"]
    if constants.HF_HUB_OFFLINE:
        faults.append("--push: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it")
    elif get_token() is None:
        faults.append("--push: there is no token of the hub. Call 'hf auth login', or set HF_TOKEN")
    return faults


def push(folder: Path, name: str) -> str:
    """Upload ``folder`` to the repository ``name``, made private if missing; returns its address.

    Raises ValueError with the reason and the remedy; ``folder`` stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    later = f"{folder} is whole: 'hf upload {name} {folder}' uploads it later"
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder))
    except HfHubHTTPError as error:
        raise ValueError(f"--push {name}: the hub refuses: {_line(error)}. {later}") from error
    except Exception as error:  # of the HTTP library that huggingface_hub uses
        raise ValueError(
            f"--push {name}: no upload to {api.endpoint}: {_line(error)}. {later}"
        ) from error


def _folder(text: str, needs: Sequence[str], downloads: bool) -> Path:
    """Local folder of ``hf:ID[@revision]``; raises ValueError with a one-line text."""
    name, _, revision = text.removeprefix("hf:").partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    several = int(os.environ.get("WORLD_SIZE") or 1) > 1

    def download(left_out: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(needs),
                ignore_patterns=list(left_out),
                local_files_only=several or not downloads,
            )
        )

    at = f" --revision {revision}" if revision else ""
    by_hand = f"hf download {name}{at} --local-dir DIR"
    try:
        folder = download([*_FOREIGN, *_SECOND_CHOICE])
        return folder if _holds_weights(folder, needs) else download(_FOREIGN)
    except HFValidationError as error:
        raise ValueError(f"{text}: write hf:OWNER/NAME[@REVISION]: {_line(error)}") from error
    except GatedRepoError as error:
        reason = "request access on its page, and run 'hf auth login'"
        raise ValueError(f"{text}: {reason}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{text}: the hub has no such revision") from error
    except RepositoryNotFoundError as error:
        reason = "the hub has no such model, or it is private ('hf auth login')"
        raise ValueError(f"{text}: {reason}") from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError, HfHubHTTPError, OSError) as error:
        part = "only partly " if isinstance(error, IncompleteSnapshotError) else "not "
        why = "the hub is unreachable"
        if not downloads:
            why = "is downloaded at the start"
        elif several:
            why = "ranks do not download; 'pulse run' downloads before it starts them"
        remedy = f"On a machine with network, run '{by_hand}', and give DIR."
        raise ValueError(f"{text}: it is {part}in the cache, and {why}. {remedy}") from error


def _holds_weights(folder: Path, needs: Sequence[str]) -> bool:
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))
    return any(fnmatch(path, pattern) for path in paths for pattern in needs)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
