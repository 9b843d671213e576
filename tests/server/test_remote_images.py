"""Pictures by URL: only from allowed hosts at public addresses, within the caps, whatever the host tries."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from kestrel.errors import ConfigError, RequestError
from kestrel.server.request_images import RemoteImages, Resolver, is_public
from tests.server.picture_hosts import host, ok, redirect

PNG = b"\x89PNG\r\n\x1a\n" + bytes(1000)
IMAGE = "Content-Type: image/png"


def resolver(*addresses: str) -> Resolver:
    async def resolve(name: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


def here(*hosts: str, **changes: object) -> RemoteImages:
    """Reaches test servers: every name is this machine, and this machine counts as public."""
    options: dict = {"resolve": resolver("127.0.0.1"), "may_connect": lambda address: address == "127.0.0.1"}
    return RemoteImages(hosts, **(options | changes))


async def fetched(images: RemoteImages, url: str, max_bytes: int = 2**20) -> bytes:
    return await images.fetch(url, max_bytes, lambda num_bytes: None)


async def refusal(images: RemoteImages, url: str, max_bytes: int = 2**20) -> str:
    with pytest.raises(RequestError) as caught:
        await fetched(images, url, max_bytes)
    assert caught.value.field == "image_url"
    assert "127.0.0.1" in url or "127.0.0.1" not in str(caught.value)
    return str(caught.value)


async def test_a_picture_of_an_allowed_host_arrives_whole() -> None:
    async with host({"/a.png?size=2": ok(PNG, IMAGE)}) as server:
        url = f"http://pictures.test:{server.port}/a.png?size=2#top"
        assert await fetched(here(f"pictures.test:{server.port}"), url) == PNG
    (request,) = server.requests
    assert request["host"] == f"pictures.test:{server.port}"
    assert request["accept-encoding"] == "identity"
    assert not {"cookie", "authorization"} & request.keys()


async def test_where_every_host_is_allowed_ports_and_addresses_are_still_checked() -> None:
    private = RemoteImages(None, resolve=resolver("10.0.0.1"))
    assert "not public" in await refusal(private, "http://pictures.test/a.png")
    assert "is not allowed" in await refusal(private, "http://pictures.test:8080/a.png")


async def test_without_hosts_nothing_is_fetched() -> None:
    assert "base64" in await refusal(here(), "http://pictures.test/a.png")


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://pictures.test.evil.test/a.png",
        "http://evilpictures.test/a.png",
        "http://pictures.test:22/a.png",
        "http://example.org/a.png",
        "http://example.org.evil.test/a.png",
        "http://127.0.0.1/a.png",
        "http://2130706433/a.png",
        "http://[::1]/a.png",
    ],
)
async def test_a_host_that_is_not_listed_is_refused_before_anything_is_resolved(url: str) -> None:
    async def never(name: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{name} was resolved")

    assert "not allowed" in await refusal(here("pictures.test", "*.example.org", resolve=never), url)


@pytest.mark.parametrize("name", ["a.example.org", "a.b.example.org", "PICTURES.test", "pictures.test."])
async def test_listed_names_and_subdomains_of_wildcards_pass(name: str) -> None:
    async with host({"/": ok(PNG, IMAGE)}) as server:
        images = here(f"pictures.test:{server.port}", f"*.example.org:{server.port}")
        assert await fetched(images, f"http://{name}:{server.port}/") == PNG


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://pictures.test/a.png",
        "gopher://pictures.test/",
        "/a.png",
        "http://user:secret@pictures.test/a.png",
        "http://",
        "http://pictures.test:99999999/",
        "http://pict\x00ures.test/",
    ],
)
async def test_only_plain_http_and_https_urls_are_taken(url: str) -> None:
    await refusal(here("pictures.test"), url)


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3", "172.16.0.1", "192.168.1.1", "127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254",
        "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::8.8.8.8", "2002:7f00:1::1", "2001:0:7f00:1::1",
        "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "not an address",
    ],
)  # fmt: skip
async def test_an_address_that_is_not_public_is_refused_also_beside_a_public_one(address: str) -> None:
    assert not is_public(address)
    for addresses in ((address,), ("93.184.215.14", address), (address, "93.184.215.14")):
        images = RemoteImages(["pictures.test"], resolve=resolver(*addresses))
        assert "not public" in await refusal(images, "http://pictures.test/a.png")


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700:4700::1111"])
def test_public_addresses_pass(address: str) -> None:
    assert is_public(address)


async def test_the_real_resolver_finds_loopback_and_refuses_it() -> None:
    async with host({"/": ok(PNG, IMAGE)}) as server:
        images = RemoteImages([f"localhost:{server.port}"])
        assert "not public" in await refusal(images, f"http://localhost:{server.port}/")
    assert server.requests == []


async def test_look_ups_do_not_wait_behind_other_work() -> None:
    """Threads that everything else shares are taken for longer than a fetch may last."""
    busy = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(busy)
    done = threading.Event()
    busy.submit(done.wait, 30)
    try:
        images = RemoteImages(["localhost:1"], timeout_s=10.0)
        assert "not public" in await refusal(images, "http://localhost:1/")
    finally:
        done.set()


async def test_rebinding_gains_nothing() -> None:
    """The name answers with a public address once and with this machine ever after: only the first is connected to."""
    num_asked = 0

    async def rebinding(name: str, port: int) -> Sequence[str]:
        nonlocal num_asked
        num_asked += 1
        return ("127.0.0.1",) if num_asked == 1 else ("127.0.0.2",)

    async with host({"/": ok(PNG, IMAGE)}) as server:
        images = here(f"pictures.test:{server.port}", resolve=rebinding)
        assert await fetched(images, f"http://pictures.test:{server.port}/") == PNG
        assert num_asked == 1
        assert "not public" in await refusal(images, f"http://pictures.test:{server.port}/")
    assert len(server.requests) == 1


async def test_redirects_are_followed_and_each_is_checked() -> None:
    async with host({"/a": redirect("/b"), "/b": redirect("//other.test/c"), "/d": redirect("/e"), "/e": ok(PNG)}) as s:
        images = here(f"pictures.test:{s.port}")
        assert await fetched(images, f"http://pictures.test:{s.port}/d") == PNG
        assert "other.test:80' is not allowed" in await refusal(images, f"http://pictures.test:{s.port}/a")
    assert [request[":path"] for request in s.requests] == ["/d", "/e", "/a", "/b"]


async def test_a_redirect_to_a_private_address_of_an_allowed_host_is_refused() -> None:
    async def resolve(name: str, port: int) -> Sequence[str]:
        return ("127.0.0.1",) if name == "pictures.test" else ("169.254.169.254",)

    async with host({"/": redirect("http://inner.test/latest/meta-data")}) as server:
        images = here(f"pictures.test:{server.port}", "inner.test", resolve=resolve)
        assert "'inner.test' has an address that is not public" in await refusal(
            images, f"http://pictures.test:{server.port}/"
        )


@pytest.mark.parametrize("target", ["file:///etc/passwd", "http://[", "http://user:x@pictures.test/"])
async def test_a_redirect_to_no_proper_url_is_refused(target: str) -> None:
    async with host({"/": redirect(target)}) as server:
        await refusal(here(f"pictures.test:{server.port}"), f"http://pictures.test:{server.port}/")
    assert len(server.requests) == 1


async def test_redirects_end() -> None:
    async with host({"/": redirect("/")}) as server:
        images = here(f"pictures.test:{server.port}", max_redirects=2)
        assert "more than 2 times" in await refusal(images, f"http://pictures.test:{server.port}/")
    assert len(server.requests) == 3


async def test_the_byte_cap_holds_with_and_without_a_declared_length() -> None:
    num_sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while num_sent < 100 * 2**20:
                writer.write(bytes(65536))
                await writer.drain()
                num_sent += 65536

    answers = {"/big": ok(bytes(5000), IMAGE), "/fits": ok(bytes(4096), IMAGE), "/endless": endless}
    async with host(answers) as server:
        images, url = here(f"pictures.test:{server.port}"), f"http://pictures.test:{server.port}"
        assert len(await fetched(images, f"{url}/fits", 4096)) == 4096
        assert "more than 4096 bytes (max_image_bytes)" in await refusal(images, f"{url}/big", 4096)
        assert "more than 4096 bytes (max_image_bytes)" in await refusal(images, f"{url}/endless", 4096)
    assert num_sent < 50 * 2**20


async def test_the_time_cap_is_for_the_whole_and_not_for_each_read() -> None:
    num_sent = 0

    async def drip(writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x")
                await writer.drain()
                num_sent += 1
                await asyncio.sleep(0.05)

    async with host({"/": drip}) as server:
        images = here(f"pictures.test:{server.port}", timeout_s=0.3)
        assert "within 0.3 s" in await refusal(images, f"http://pictures.test:{server.port}/")
    assert 1 < num_sent < 100


async def test_a_slow_resolver_counts_against_the_time() -> None:
    async def slow(name: str, port: int) -> Sequence[str]:
        await asyncio.sleep(30)
        return ()

    assert "within 0.1 s" in await refusal(here("pictures.test", resolve=slow, timeout_s=0.1), "http://pictures.test/")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ok(b"<html>", "Content-Type: text/html; charset=utf-8"), "'text/html'"),
        (ok(b"{}", "Content-Type: application/json"), "'application/json'"),
        (ok(PNG, IMAGE, "Content-Encoding: gzip"), "compressed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "times"),
        (b"no http at all\r\n\r\n", "RemoteProtocolError"),
        (ok(PNG, IMAGE)[:-5], "RemoteProtocolError"),
    ],
)
async def test_what_is_no_picture_is_refused_with_the_reason(answer: bytes, says: str) -> None:
    async with host({"/": answer}) as server:
        assert says in await refusal(here(f"pictures.test:{server.port}"), f"http://pictures.test:{server.port}/")


@pytest.mark.parametrize("header", ["X-None: 1", "Content-Type: application/octet-stream", "Content-Type: IMAGE/webp"])
async def test_unnamed_and_unknown_kinds_are_left_to_the_decoder(header: str) -> None:
    async with host({"/": ok(PNG, header)}) as server:
        assert await fetched(here(f"pictures.test:{server.port}"), f"http://pictures.test:{server.port}/") == PNG


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async with host({"/": ok(PNG, IMAGE)}) as server:
        images = here(
            f"pictures.test:{server.port}",
            resolve=resolver("127.0.0.9", "127.0.0.1"),
            may_connect=lambda address: address.startswith("127."),
        )
        assert await fetched(images, f"http://pictures.test:{server.port}/") == PNG


async def test_tls_is_checked_against_the_name_and_not_the_address() -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("pictures.test")
    server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    certificate.configure_cert(server_tls)
    authority.configure_trust(client_tls)
    names: list[str | None] = []
    server_tls.sni_callback = lambda connection, name, context: names.append(name)
    async with host({"/": ok(PNG, IMAGE), "/down": redirect("http://pictures.test/")}, server_tls) as server:
        images = here(f"pictures.test:{server.port}", f"other.test:{server.port}", tls=client_tls)
        assert await fetched(images, f"https://pictures.test:{server.port}/") == PNG
        assert "could not be reached" in await refusal(images, f"https://other.test:{server.port}/")
        assert "from https to http" in await refusal(images, f"https://pictures.test:{server.port}/down")
        untrusting = here(f"pictures.test:{server.port}")
        assert "could not be reached" in await refusal(untrusting, f"https://pictures.test:{server.port}/")
    assert names == ["pictures.test", "other.test", "pictures.test", "pictures.test"]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with host({"/": ok(PNG, IMAGE)}) as server:
        assert await fetched(here(f"pictures.test:{server.port}"), f"http://pictures.test:{server.port}/") == PNG


@pytest.mark.parametrize("entry", ["", "*", "*.", "*.org", "http://pictures.test", "a b", "name:port", "näme.test"])
def test_an_entry_that_is_no_host_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="image_hosts"):
        RemoteImages([entry])
