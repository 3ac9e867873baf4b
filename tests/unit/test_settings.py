"""What the resource and the environment together say of how a store is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagelplane.errors import StorageError
from bagelplane.settings import CREDENTIALS_VARIABLE, storage_settings
from bagelplane.spec import BagelDataset
from tests.integration.sidecar_harness import make_dataset


def dataset_with(storage: dict[str, object]) -> BagelDataset:
    data = make_dataset(snapshots=None).to_mapping()
    data["spec"]["storage"] = storage
    return BagelDataset.from_mapping(data)


def test_the_environment_says_where_the_secret_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_with({"secretRef": {"name": "keys"}, "credentialsDir": "/of/another/machine"})
    monkeypatch.setenv(CREDENTIALS_VARIABLE, "/etc/bagelplane/credentials")
    assert storage_settings(dataset).credentials_dir == "/etc/bagelplane/credentials"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_the_resource_decides(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(CREDENTIALS_VARIABLE, value)
    assert storage_settings(dataset_with({"credentialsDir": "keys"})).credentials_dir == "keys"
    assert storage_settings(dataset_with({"secretRef": {"name": "keys"}})).credentials_dir is None


def test_a_secret_that_is_not_mounted_is_named_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(tmp_path))
    with pytest.raises(StorageError, match=f"no credentials in {tmp_path}.*{CREDENTIALS_VARIABLE}"):
        storage_settings(dataset_with({})).read_credentials()
