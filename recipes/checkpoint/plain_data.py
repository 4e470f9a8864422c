"""What a checkpoint holds beside tensors, as bytes that `weights_only=True` is known to load."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch


def serialized(plain: Mapping[str, Any]) -> bytes:
    """As torch writes it.

    Raises:
        TypeError: Something in it would not be read back, such as a path in the state of a callback.
    """
    content, why = _round_trip(dict(plain))
    if why is not None:
        raise TypeError(
            f"the state under {_where(plain)} is no plain data: {why}; keep numbers, strings, lists and dicts there"
        )
    return content


def _round_trip(value: Any) -> tuple[bytes, str | None]:
    """The bytes, and why they could not be loaded."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        why = next((line for line in lines if "GLOBAL" in line), lines[0])
        return b"", why.split(" was not an allowed")[0]
    return file.getvalue(), None


def _where(plain: Mapping[str, Any]) -> str:
    """The key of what cannot be loaded, and the key in it."""
    for key, value in plain.items():
        if _round_trip(value)[1] is None:
            continue
        inner = value if isinstance(value, Mapping) else {}
        wrong = (name for name, one in inner.items() if _round_trip(one)[1] is not None)
        return "/".join([key, *[str(name) for name in wrong][:1]])
    return "several keys"
