"""Kinds of files that commands read, and their detection."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any


class FileKind(Enum):
    """Kind of a file, as messages call it."""

    PLAN = "a plan"
    VERIFICATION = "a certificate of 'pulse verify'"
    PROFILE = "a profile"
    TABLE = "a layer table"
    TIMES = "a file of times"
    TRACE = "a trace"
    CLUSTER = "a cluster"
    ENCODERS = "a table of encoders"
    TUNING = "the output of 'pulse tune --json'"
    SCHEDULE = "a schedule"
    GRAPH = "a traced graph"
    LATENTS = "the meta.json of latents"
    STORES = "the buckets.json of latents"
    CAPTIONS = "a list of captions"
    CAPTION = "a caption"
    SPLITS = "the split.yaml of Megatron-Energon"
    DATASETS = "the state.json of a saved dataset"
    ADAPTER = "an adapter_config.json"
    MODEL = "a model's config.json"
    PIPELINE = "a pipeline's model_index.json"
    SCHEDULER = "a scheduler's config"
    BETAS = "a list of betas"
    INDEX = "an index of weights"
    CHECKPOINT = "the metadata.json of a checkpoint"
    LATEST = "the name of the newest checkpoint"
    BEST = "the record of the best checkpoint"

    def __str__(self) -> str:
        return self.value

    def use(self, path: str | Path) -> str:
        """Hint at the use of such a file."""
        return _USES[self].format(path=path)

    def made(self, path: str | Path) -> str:
        """Command that makes such a file; empty if no command writes it."""
        return _MAKERS.get(self, "").format(path=path)


_MAKERS = {
    FileKind.PLAN: "'pulse tune ... -o {path}' makes one",
    FileKind.VERIFICATION: "'pulse verify PLAN -o {path}' makes one",
    FileKind.PROFILE: "'pulse profile --backbone NAME -o {path}' makes one",
    FileKind.TRACE: "a run with --pulse-trace DIR writes one",
    FileKind.CLUSTER: "'pulse clusters' lists presets, 'pulse clusters NAME > {path}' writes one",
    FileKind.ENCODERS: "'pulse profile --backbone NAME --encoders DIR -o {path}' makes one",
}

_USES = {
    FileKind.PLAN: "'pulse show {path}' shows it, a run with --pulse-plan {path} runs it",
    FileKind.VERIFICATION: "'pulse show PLAN --verified {path}' prints it",
    FileKind.PROFILE: "'pulse tune --profile {path} ... -o plan.json' makes a plan from it",
    FileKind.TABLE: "'pulse profile --from-table {path} ... -o profile.json' reads it",
    FileKind.TIMES: "'pulse schedule --times {path} ...' reads it",
    FileKind.TRACE: "'pulse compare PLAN {path}' reads it",
    FileKind.CLUSTER: "'pulse tune --cluster {path} ...' reads it",
    FileKind.ENCODERS: "'pulse tune --encoders {path} ...' reads it",
    FileKind.TUNING: "'pulse tune ... -o plan.json' writes the best of it as a plan",
    FileKind.SCHEDULE: "a plan holds it; 'pulse schedule --schedule' reads orders as CSV",
    FileKind.GRAPH: "it is in the cache of derived modules, which may be removed",
    FileKind.LATENTS: "--pulse-data latents:FOLDER reads its folder",
    FileKind.STORES: "--pulse-data latents:FOLDER reads its folder",
    FileKind.CAPTIONS: "--pulse-data captions:FOLDER reads its folder",
    FileKind.CAPTION: "--pulse-data captions:FOLDER reads its folder",
    FileKind.DATASETS: "--pulse-data datasets:FOLDER reads its folder",
    FileKind.SPLITS: "--pulse-data webdataset:FOLDER reads the folder of its tars",
    FileKind.MODEL: "'pulse import --from FOLDER' reads its folder",
    FileKind.PIPELINE: "'pulse import --from FOLDER' reads its folder",
    FileKind.SCHEDULER: "'pulse import --from FOLDER' reads its pipeline's folder",
    FileKind.BETAS: "--pulse-trained-betas {path} trains with it",
    FileKind.INDEX: "'pulse import --from FOLDER' reads its folder",
    FileKind.CHECKPOINT: "--load FOLDER reads the folder above its own",
    FileKind.LATEST: "--load FOLDER reads its folder",
}


def detect_kind(record: Mapping[str, Any]) -> FileKind | None:
    """Kind of a file with this content; None if unknown."""
    form = record.get("format")
    if isinstance(form, str):
        for kind, name in (
            (FileKind.PLAN, "plan"),
            (FileKind.VERIFICATION, "verification"),
            (FileKind.PROFILE, "profile"),
            (FileKind.ENCODERS, "encoders"),
            (FileKind.GRAPH, "graph"),
        ):
            if form.startswith(f"megatron_pulse {name} "):
                return kind
    class_name = record.get("_class_name")
    if isinstance(class_name, str):
        if class_name.endswith("Pipeline"):
            return FileKind.PIPELINE
        return FileKind.SCHEDULER if "Scheduler" in class_name else FileKind.MODEL
    for kind, keys in _KEYS.items():
        if keys <= record.keys():
            return kind
    return None


_KEYS = {
    FileKind.TRACE: {"schema", "steps", "clock"},
    FileKind.TABLE: {"units", "skips"},
    FileKind.CLUSTER: {"nodes", "devices_per_node", "links"},
    FileKind.LATENTS: {"layout", "shards"},
    FileKind.STORES: {"stores"},
    FileKind.INDEX: {"weight_map"},
    FileKind.CHECKPOINT: {"sharded_backend"},
    FileKind.SCHEDULE: {"device_of_stage", "order"},
    FileKind.TUNING: {"outcomes", "num_configs", "certainty"},
    FileKind.TIMES: {"forward", "backward"},
}
