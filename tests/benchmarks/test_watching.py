"""The benchmark of what observing costs times every class that it names."""

import pytest
import watching


def test_every_observer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SKIP", 2)
    found = watching.hook_milliseconds(["data=random_tokens", "trainer.max_steps=12", "eval_every=12"])
    assert found.keys() == set(watching.WATCHING)
    assert min(found.values()) > 0
