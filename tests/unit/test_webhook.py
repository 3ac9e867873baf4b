"""The webhook's server over real TLS: bodies, certificates that change, an orderly end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from bagelplane.cli.demo_server import free_port
from bagelplane.errors import SpecError
from bagelplane_operator.admission import Datasets
from bagelplane_operator.cluster import Cluster, load_configuration
from bagelplane_operator.webhook import (
    MAX_BODY_BYTES,
    Certificates,
    ClusterDatasets,
    WebhookServer,
    WebhookSettings,
    read_defaults,
)
from tests.cluster.certificates import Authority, KeyPair
from tests.unit.test_admission import DEFAULTS, FakeDatasets, example, pod, review

DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "tests")


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> list[KeyPair]:
    """Pairs for the same host; the number is in the name."""
    return [authority.issue(f"pair-{n}", f"pair-{n}", hosts=["127.0.0.1", "localhost"]) for n in range(3)]


@pytest.fixture
def cert_dir(tmp_path: Path, pairs: list[KeyPair]) -> Path:
    folder = tmp_path / "certificate"
    folder.mkdir()
    mount(folder, pairs[0])
    return folder


def mount(folder: Path, pair: KeyPair) -> None:
    """Puts a pair there as the kubelet does: a folder beside, then one link changed."""
    versions = len(list(folder.glob("..[0-9]*")))
    fresh = folder / f"..{versions}"
    fresh.mkdir()
    shutil.copy(pair.certificate, fresh / "tls.crt")
    shutil.copy(pair.key, fresh / "tls.key")
    (folder / "..next").symlink_to(fresh.name)
    (folder / "..next").replace(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


@asynccontextmanager
async def serving(cert_dir: Path, datasets: Datasets, **settings: Any) -> AsyncIterator[WebhookServer]:
    # Not 0: it listens on two families, and each would get a port of its own.
    settings = {"port": free_port(), "drain_seconds": 0.0, "certificate_seconds": 0.02} | settings
    async with WebhookServer(WebhookSettings(cert_dir, **settings), datasets, DEFAULTS) as server:
        yield server


@asynccontextmanager
async def client(authority: Authority, *, keep: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    connector = aiohttp.TCPConnector(ssl=trusted, force_close=not keep)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def until(what: Callable[[], bool], tell: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_SECONDS
    while not what():
        assert loop.time() < end, f"not within {DEADLINE_SECONDS:g} s; last seen: {tell()}"
        await asyncio.sleep(0.01)


# --- questions and answers ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_questions_are_answered_over_tls(cert_dir: Path, authority: Authority, host: str) -> None:
    async def scenario() -> None:
        async with serving(cert_dir, FakeDatasets(example())) as server, client(authority) as session:
            root = f"https://{host}:{server.port}"
            for path in ("/healthz", "/readyz"):
                async with session.get(root + path) as answer:
                    assert answer.status == 200
            async with session.post(f"{root}/inject-pods", json=review("Pod", pod())) as answer:
                response = (await answer.json())["response"]
                assert (response["uid"], response["allowed"], response["patchType"]) == (
                    "u1",
                    True,
                    "JSONPatch",
                )
            question = review("BagelDataset", example(storage={"cache": {"sizeLimit": "1Gi"}}))
            async with session.post(f"{root}/check-datasets", json=question) as answer:
                response = (await answer.json())["response"]
                assert not response["allowed"]
                assert response["status"]["message"].startswith(
                    "BagelDataset bagel-sft: spec.storage.cache: is set"
                )

    asyncio.run(scenario())


def test_hostile_bodies_get_an_answer_and_leave_the_server_well(cert_dir: Path, authority: Authority) -> None:
    bodies = [
        (b"", 400),
        (b"\x00" * 100, 400),
        (b"[" * 200_000, 400),
        (b"{}", 400),
        (json.dumps(review("Secret", {})).encode(), 400),
        (json.dumps(review("BagelDataset", {"spec": {str(n): n for n in range(100_000)}})).encode(), 200),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ]

    async def scenario() -> None:
        async with serving(cert_dir, FakeDatasets()) as server, client(authority) as session:
            for body, status in bodies:
                async with session.post(
                    f"https://127.0.0.1:{server.port}/check-datasets", data=io.BytesIO(body)
                ) as answer:
                    text = await answer.text()
                    assert answer.status == status, text[:300]
                    assert "Traceback" not in text
                    assert len(text) < 10_000
            async with session.get(f"https://127.0.0.1:{server.port}/inject-pods") as answer:
                assert answer.status == 405
            # One that says how long it is, and leaves in the middle.
            trusted = ssl.create_default_context(cafile=str(authority.certificate))
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
            writer.write(b"POST /inject-pods HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            async with session.get(f"https://127.0.0.1:{server.port}/healthz") as answer:
                assert answer.status == 200

    asyncio.run(scenario())


def test_the_log_has_no_values_of_a_pods_environment(
    cert_dir: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    asked = pod()
    asked["spec"]["containers"][0]["env"] = [
        {"name": name, "value": "hunter2"} for name in ("TOKEN", "PET_NPROC_PER_NODE", "BAGELPLANE_DIR")
    ]

    async def scenario() -> None:
        async with serving(cert_dir, FakeDatasets(example())) as server, client(authority) as session:
            url = f"https://127.0.0.1:{server.port}/inject-pods"
            async with session.post(url, json=review("Pod", asked)) as answer:
                assert not (await answer.json())["response"]["allowed"]
            async with session.post(url, data=b'{"hunter2') as answer:
                assert answer.status == 400

    with caplog.at_level("DEBUG"):
        asyncio.run(scenario())
    assert "Pod training/train-: container main sets BAGELPLANE_DIR itself" in caplog.text
    assert "hunter2" not in caplog.text


# --- certificates ---------------------------------------------------------------------------------


def test_a_folder_without_a_pair_that_works_is_refused(tmp_path: Path, pairs: list[KeyPair]) -> None:
    with pytest.raises(SpecError, match=r"no usable pair tls\.crt and tls\.key .* No such file"):
        Certificates(tmp_path)
    shutil.copy(pairs[0].certificate, tmp_path / "tls.crt")
    shutil.copy(pairs[1].key, tmp_path / "tls.key")
    with pytest.raises(SpecError, match=r"no usable pair.*Fix: mount the Secret"):
        Certificates(tmp_path)


def test_a_port_that_is_taken_is_named(cert_dir: Path) -> None:
    async def scenario() -> None:
        async with serving(cert_dir, FakeDatasets()) as server:
            with pytest.raises(SpecError, match=f"cannot listen on port {server.port}"):
                async with serving(cert_dir, FakeDatasets(), port=server.port):
                    pass

    asyncio.run(scenario())


def test_certificates_change_under_load_without_a_request_lost(
    cert_dir: Path, authority: Authority, pairs: list[KeyPair]
) -> None:
    seen: list[str] = []
    failures: list[str] = []
    done = asyncio.Event()
    question = json.dumps(review("Pod", pod())).encode()

    async def ask_on_one_connection(port: int) -> None:
        async with client(authority) as session:
            while not done.is_set():
                try:
                    async with session.post(f"https://127.0.0.1:{port}/inject-pods", data=question) as answer:
                        assert (await answer.json())["response"]["allowed"]
                except (aiohttp.ClientError, OSError) as error:
                    failures.append(repr(error))

    async def ask_on_new_connections(port: int) -> None:
        trusted = ssl.create_default_context(cafile=str(authority.certificate))
        head = f"POST /inject-pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(question)}\r\n\r\n"
        while not done.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
                certificate = writer.get_extra_info("peercert")
                writer.write(head.encode() + question)
                answer = await reader.read()
                writer.close()
                await writer.wait_closed()
                assert b'"allowed": true' in answer
                seen.append(certificate["subject"][0][0][1])
            except OSError as error:
                failures.append(repr(error))

    async def scenario() -> None:
        async with serving(cert_dir, FakeDatasets(example())) as server:
            asks = (ask_on_one_connection, ask_on_new_connections, ask_on_new_connections)
            asking = [asyncio.create_task(ask(server.port)) for ask in asks]
            for n in (1, 2, 0, 1):
                await until(lambda: bool(seen), lambda: seen)
                # First as it should not be: one file after the other, so that for a while they do not match.
                half = cert_dir / "..data" / "tls.crt"
                half.unlink()
                shutil.copy(pairs[(n + 1) % 3].certificate, half)
                count = len(seen)
                await until(lambda count=count: len(seen) > count + 5, lambda: len(seen))
                mount(cert_dir, pairs[n])
                await until(lambda n=n: seen[-1] == f"pair-{n}", lambda: seen[-1])
            done.set()
            await asyncio.gather(*asking)

    asyncio.run(scenario())
    assert failures == []
    assert set(seen) == {"pair-0", "pair-1", "pair-2"}


# --- the process ----------------------------------------------------------------------------------


@asynccontextmanager
async def fake_api_server(tmp_path: Path, handle: Callable[[web.Request], Any]) -> AsyncIterator[Path]:
    """What answers in the place of the Kubernetes API; yields a kubeconfig that leads there."""
    application = web.Application()
    application.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield write_kubeconfig(tmp_path, runner.addresses[0][1])
    await runner.cleanup()


def write_kubeconfig(tmp_path: Path, port: int) -> Path:
    path = tmp_path / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return path


async def list_datasets(request: web.Request) -> web.Response:
    """A slow API server with one dataset, which knows field selectors by name."""
    await asyncio.sleep(0.05)
    assert request.path == "/apis/bagelplane.io/v1alpha1/namespaces/training/bageldatasets"
    wanted = request.query.get("fieldSelector", "")
    items = [example()] if wanted in ("", "metadata.name=bagel-sft") else []
    return web.json_response({"metadata": {}, "items": items})


def test_datasets_are_looked_up_at_the_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fake_api_server(tmp_path, list_datasets) as kubeconfig:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            async with Cluster(await load_configuration()) as cluster:
                datasets = ClusterDatasets(cluster)
                found = await datasets.find("training", "bagel-sft")
                assert found is not None
                assert found["metadata"]["generation"] == 7
                assert await datasets.find("training", "other") is None
                assert await datasets.names("training") == ["bagel-sft"]

    asyncio.run(scenario())


def test_an_api_server_that_is_gone_or_hangs_is_a_refusal_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cert_dir: Path, authority: Authority
) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(DEADLINE_SECONDS)
        raise AssertionError("waited for")

    async def refusal(kubeconfig: Path) -> dict[str, Any]:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        async with (
            Cluster(await load_configuration()) as cluster,
            serving(cert_dir, ClusterDatasets(cluster)) as server,
            client(authority) as session,
            session.post(f"https://127.0.0.1:{server.port}/inject-pods", json=review("Pod", pod())) as answer,
        ):
            response = (await answer.json())["response"]
            assert not response["allowed"]
            status: dict[str, Any] = response["status"]
            return status

    async def scenario() -> None:
        beginning = "BagelDataset bagel-sft could not be looked up in namespace training: the API server"
        status = await refusal(write_kubeconfig(tmp_path, free_port()))
        assert status["code"] == 503
        assert status["message"].startswith(beginning)
        monkeypatch.setattr("bagelplane_operator.webhook.LOOKUP_SECONDS", 0.2)
        async with fake_api_server(tmp_path, hang) as kubeconfig:
            status = await refusal(kubeconfig)
            assert status["message"].startswith(f"{beginning} did not answer within 0.2 s")

    asyncio.run(scenario())


def test_sigterm_under_load_loses_no_request(tmp_path: Path, cert_dir: Path, authority: Authority) -> None:
    answered, failures = [0], []

    async def ask(root: str) -> None:
        """As the API server does by way of a Service: new requests go to replicas that are ready."""
        async with client(authority) as session:
            while True:
                try:
                    async with session.get(f"{root}/readyz") as answer:
                        if answer.status == 503:
                            return
                    async with session.post(f"{root}/inject-pods", json=review("Pod", pod())) as answer:
                        assert (await answer.json())["response"]["allowed"]
                        answered[0] += 1
                except (aiohttp.ClientError, OSError) as error:
                    failures.append(repr(error))
                    return

    async def ready(root: str, process: asyncio.subprocess.Process) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), client(authority) as session:
            while True:
                assert process.returncode is None, "it ended instead of serving"
                try:
                    async with session.get(f"{root}/readyz") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)

    async def scenario() -> None:
        port = free_port()
        async with fake_api_server(tmp_path, list_datasets) as kubeconfig:
            command = [
                "-m",
                "bagelplane_operator",
                "webhook",
                "--cert-dir",
                str(cert_dir),
                "--port",
                str(port),
            ]
            environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "BAGELPLANE_DATAPLANE_IMAGE": "image"}
            process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
            try:
                await ready(f"https://127.0.0.1:{port}", process)
                asking = [asyncio.create_task(ask(f"https://127.0.0.1:{port}")) for _ in range(8)]
                await until(lambda: answered[0] > 20 or bool(failures), lambda: answered)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await asyncio.gather(*asking)
                    assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(scenario())
    assert failures == []


def test_the_image_comes_from_the_environment() -> None:
    defaults = read_defaults(
        {"BAGELPLANE_DATAPLANE_IMAGE": "image:1", "BAGELPLANE_DATAPLANE_IMAGE_PULL_POLICY": "Always"}
    )
    assert (defaults.image, defaults.image_pull_policy, defaults.log_format) == ("image:1", "Always", "")
    as_json = {"BAGELPLANE_DATAPLANE_IMAGE": "image:1", "BAGELPLANE_SIDECAR_LOG_FORMAT": "json"}
    assert read_defaults(as_json).log_format == "json"
    with pytest.raises(SpecError, match="BAGELPLANE_SIDECAR_LOG_FORMAT is not known"):
        read_defaults({**as_json, "BAGELPLANE_SIDECAR_LOG_FORMAT": "xml"})
    with pytest.raises(SpecError, match="BAGELPLANE_DATAPLANE_IMAGE is not set"):
        read_defaults({})
