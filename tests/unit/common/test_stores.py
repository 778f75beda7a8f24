"""Stores by fsspec: what is tried again, what is not, and the message in the end."""

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from common import stores
from common.errors import UserError
from common.stores import Store, is_url
from data.shards.cache import ShardCache
from data.shards.dataset import open_dataset
from tests.unit.data.stores import make_shards, mirror, put, write_folder

FLAG = "--upload_checkpoints"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "WAITS", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("text", ["s3://bucket", "https://host/x", "simplecache::s3://bucket", "memory://"])
def test_urls(text: str) -> None:
    assert is_url(text)
    assert not any(map(is_url, ("data", "/data", "./a:b", "a:/b", "C:\\data")))


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([OSError("reset"), TimeoutError(), ConnectionError()], None),
        ([OSError("down")] * 4, r"x/a: failed 4 times in 0 s \(OSError: down\)\. Check the store"),
        ([PermissionError("Forbidden")], r"x/a: access was denied \(PermissionError: Forbidden\).*AWS_PROFILE"),
        ([NotImplementedError()], r"x/a: access was denied \(NotImplementedError\)"),
    ],
)
def test_attempts(failures: list[Exception], message: str | None) -> None:
    left = iter(failures)

    def action() -> str:
        for failure in left:
            raise failure
        return "done"

    store = Store("memory://user:secret@x", FLAG)
    assert "secret" not in store.url
    if message is None:
        assert store.attempt(action, "a") == "done"
    else:
        with pytest.raises(UserError, match=message):
            store.attempt(action, "a")
    assert next(left, None) is None


def test_an_unknown_kind_of_store() -> None:
    with pytest.raises(UserError, match=r"gopher://x: cannot be used .*expected a folder, or a URL that fsspec knows"):
        Store("gopher://x", FLAG)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket in a local server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("bucket")
    yield "s3://bucket"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_s3(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"{bucket}/runs/job", FLAG)
    assert store.list() == {}
    (tmp_path / "weights").write_bytes(b"x" * 1000)
    store.upload(tmp_path / "weights", "step_1/weights")
    store.write("step_1/manifest.json", b"{}")
    assert store.list() == {"step_1": None}
    assert store.list("step_1") == {"weights": 1000, "manifest.json": 2}
    store.download("step_1/weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"x" * 1000
    store.remove("step_1/manifest.json")
    store.remove("step_1/manifest.json")
    with pytest.raises(FileNotFoundError):
        store.read("step_1/manifest.json")
    store.remove("step_1")
    assert store.list() == {}
    with pytest.raises(
        UserError, match=r"s3://lost/job/a: cannot be written .*expected a bucket or folder that exists"
    ):
        Store("s3://lost/job", FLAG).write("a", b"")
    check_shards(f"{bucket}/corpus", tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(UserError, match=r"access was denied \(NoCredentialsError: Unable to locate credentials\)"):
        Store(bucket, FLAG).read("a")


def check_shards(url: str, folder: Path) -> None:
    """Shards behind a URL are opened and read; the server's `24` has them already, or they are put there."""
    shards = make_shards([300, 100])
    if not url.startswith("http"):
        put(f"{url}/24", shards)
    cache = ShardCache(folder / "cache", 1.0)
    shape = {"split": "training", "max_seq_length": 24, "max_predictions_per_seq": 4}
    data = open_dataset([mirror(cache, url)], cache=cache, **shape)  # type: ignore[arg-type]
    local = open_dataset([write_folder(folder / "local" / "24", shards)], **shape)  # type: ignore[arg-type]
    assert data.digest == local.digest
    assert (data.read_range(0, 400).input_ids == local.read_range(0, 400).input_ids).all()


def test_http_without_listing_or_ranges(tmp_path: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def list_directory(self, path: object) -> None:  # type: ignore[override]
            self.send_error(403)

    write_folder(tmp_path / "served" / "24", make_shards([300, 100]))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "served"))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        check_shards(url, tmp_path)
        with pytest.raises(UserError, match="access was denied"):
            Store(url, FLAG).write("a", b"")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
