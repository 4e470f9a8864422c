"""What of a run folder TensorBoard shows, as its records: a row, a text, the hyperparameters. No file is written."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_COMPARED = ("train/loss", "val/loss")  # beside the hyperparameters
_NO_HYPERPARAMETERS = ("mode", "dashboard", "callbacks", "logger", "hydra", "resume", "tags")


def row_record(row: Mapping[str, float]) -> Any:
    """All values of a row in one `Summary`, as float32: what every reader takes, and TensorBoard draws."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=row[tag]) for tag in row])


def text_record(tag: str, text: str) -> Any:
    from torch.utils.tensorboard.summary import text as record

    return record(tag, text)  # type: ignore[no-untyped-call]


def start_record() -> Any:
    """An `Event` that ends what was written for its step and later ones, unless it is the first of its kind."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(session_log=SessionLog(status=SessionLog.START))


def hyperparameter_records(config: str) -> list[Any]:
    """Two, of the values of a config.yaml; those of nested sections by their whole keys.

    Args:
        config: Its text.
    """
    from torch.utils.tensorboard.summary import hparams

    sections = yaml.safe_load(config)
    of_run = {key: value for key, value in sections.items() if key not in _NO_HYPERPARAMETERS}
    records: Any = hparams(dict(_leaves(of_run)), dict.fromkeys(_COMPARED, 0.0))  # type: ignore[no-untyped-call]
    return list(records[:2])  # the third is of a session that has ended


def event_text(event: Mapping[str, Any]) -> tuple[str, str]:
    """Tag and text of a line of events.jsonl: a tag for each kind, as TensorBoard sorts the texts of one by step."""
    fields = {key: event[key] for key in event if key not in ("time", "step", "event")}
    shown = ", ".join(f"{key} {value}" for key, value in fields.items())
    return f"events/{event['event']}", shown or event["event"]


def sample_text(sample: Mapping[str, Any]) -> str:
    """Of a line of samples.jsonl."""
    return verbatim(sample["prompt"] + sample["text"])


def verbatim(text: str) -> str:
    """Markdown that shows it letter by letter."""
    return textwrap.indent(text, "    ")


def _leaves(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under its whole key; lists as text, what is null left out."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        elif value is not None and key != "_partial_":
            yield f"{path}{key}", str(value) if isinstance(value, list) else value
