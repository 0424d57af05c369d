"""Where rows are: what a `Deployment` refuses, and the arguments of `Embeddings` that moved into it."""

from typing import Any

import pytest

from satrap import ConfigError, Deployment, Embeddings, Table

ADDRESS = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": []}, r"Deployment: servers is \[\]; expected a list of at least one 'tcp://host:port', or None"),
        ({"servers": ADDRESS}, f"servers is '{ADDRESS}'; expected a list of 'tcp://host:port'"),
        ({"servers": [1]}, r"servers is \[1\]; expected a list of 'tcp://host:port'"),
        ({"servers": [ADDRESS, ADDRESS]}, r"Deployment: servers is \[.*\]; expected each server once"),
        ({"servers": [ADDRESS], "keys": "/"}, "Deployment: keys is '/', a folder; expected a file in it: client.key"),
        (
            {"shared": "/"},
            "Deployment: shared is '/', a folder; expected a file to create in it, such as /dev/shm/rows",
        ),
        ({"workers": ADDRESS}, f"workers is '{ADDRESS}'; expected a list"),
        ({"wire": "fp16"}, r"Deployment: wire is 'fp16' \(str\); expected one of 'float32', 'float16'"),
        ({"take_over": 1}, r"Deployment: take_over is 1 \(int\); expected True or False"),
        (
            {"servers": [ADDRESS], "shared": "rows"},
            "shared is .*, but servers hold them: pass it to `satrap server`",
        ),
    ],
)
def test_invalid_options_are_refused_when_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployment(**options)


@pytest.mark.parametrize("name", ["servers", "workers", "keys", "wire", "shared", "take_over"])
def test_arguments_that_moved_are_named(name: str) -> None:
    message = rf"unexpected keyword argument '{name}': write deployment=satrap\.Deployment\({name}=\.\.\.\)"
    with pytest.raises(TypeError, match=message):
        Embeddings({"id": Table("t", dim=2)}, **{name: None})  # type: ignore[arg-type]


def test_other_arguments_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'stalenes': the nearest known one is 'staleness'$"
    ):
        Embeddings({"id": Table("t", dim=2)}, stalenes=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"deployment is a list; expected a satrap\.Deployment, or None"):
        Embeddings({"id": Table("t", dim=2)}, deployment=[ADDRESS])  # type: ignore[arg-type]


def test_equal_deployments_are_interchangeable() -> None:
    assert Deployment([ADDRESS]) == Deployment((ADDRESS,)) and hash(Deployment([ADDRESS])) == hash(
        Deployment((ADDRESS,))
    )
