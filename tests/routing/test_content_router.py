"""Requests find the replica that knows them, while it has room."""

import random
from collections import Counter

import pytest

from kestrel.routing import ContentRouter, PrefixKeys, ReplicaLoad, prefix_keys
from kestrel.routing.router import ADAPTER_WORTH

REPLICAS = ("a", "b", "c", "d")


def router_of(replicas=REPLICAS, **options):
    router = ContentRouter(**options)
    for replica in replicas:
        router.add_replica(replica)
    return router


def loads(max_running=4, adapters=None, **running):
    return {
        name: ReplicaLoad(running.get(name, 0), 0, max_running, frozenset((adapters or {}).get(name, ())))
        for name in REPLICAS
    }


def key(name):
    return prefix_keys({}, [name], adapter=None, tenant=None)


def routed(order, *, num_routers=1, at_once=1):
    """Hits, and requests by replica, of pictures asked about in this order; each request lasts `at_once` turns."""
    routers = [router_of(has_others=num_routers > 1) for _ in range(num_routers)]
    has = {name: set() for name in REPLICAS}
    running, hits, counts = [], 0, Counter()
    for turn, picture in enumerate(order):
        running = running[-(at_once - 1) :] if at_once > 1 else []
        router = routers[turn % num_routers]
        chosen = router.rank(key(picture), None, loads(16, **Counter(running)))[0]
        hits += picture in has[chosen]
        has[chosen].add(picture)
        router.note(chosen, key(picture))
        running.append(chosen)
        counts[chosen] += 1
    return hits, counts


@pytest.mark.parametrize(("at_once", "num_routers"), [(1, 1), (32, 1), (48, 1), (1, 3), (16, 3)])
def test_200_questions_about_20_pictures_over_4_replicas_find_90_percent_of_possible_hits(at_once, num_routers):
    """Up to three quarters of 4 × 16 rows are taken; several routers know only what they sent themselves."""
    for seed in range(10):
        order = [f"picture {number % 20}" for number in range(200)]
        random.Random(seed).shuffle(order)
        hits, counts = routed(order, num_routers=num_routers, at_once=at_once)
        assert hits >= 0.9 * 180
        assert len(counts) == len(REPLICAS)


def test_a_hot_picture_spreads_when_its_replica_is_full_and_no_sooner():
    router, running = router_of(), Counter()
    chosen = []
    for _ in range(16):
        best = router.rank(key("hot"), None, loads(**running))[0]
        router.note(best, key("hot"))
        running[best] += 1
        chosen.append(best)
    assert [len(set(chosen[start : start + 4])) for start in range(0, 16, 4)] == [1, 1, 1, 1]
    assert set(chosen) == set(REPLICAS)


def test_when_all_are_full_what_is_known_counts_within_a_batch_of_queue():
    router = router_of()
    router.note("b", key("p"))
    assert router.rank(key("p"), None, loads(a=4, b=7, c=4, d=4))[0] == "b"
    assert router.rank(key("p"), None, loads(a=4, b=8, c=4, d=4))[0] != "b"


def test_a_longer_known_beginning_wins():
    router = router_of()
    keys = prefix_keys({"prompt": "x" * 2000}, ["p"], adapter=None, tenant=None)
    router.note("a", PrefixKeys(keys.pictures))
    router.note("c", PrefixKeys(keys.pictures, keys.blocks[:3]))
    assert router.rank(keys, None, loads())[:2] == ["c", "a"]
    assert router.num_known("c", keys) == (1, 3)


def test_text_counts_behind_its_picture_only():
    router = router_of()
    keys = prefix_keys({"prompt": "x" * 2000}, ["p"], adapter=None, tenant=None)
    router.note("a", PrefixKeys((), keys.blocks))
    assert router.num_known("a", keys) == (0, 0)


@pytest.mark.parametrize(("max_running", "worth"), [(4, 1), (16, 4), (64, 8)])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_loaded_adapter_makes_up_for_some_requests(max_running, worth, has_others):
    router = router_of(has_others=has_others)
    where = {"d": ["birds"]}
    assert router.rank(PrefixKeys(), "birds", loads(max_running, where, d=worth))[0] == "d"
    assert router.rank(PrefixKeys(), "birds", loads(max_running, where, d=worth + 1))[0] != "d"


def test_several_routers_send_new_pictures_where_the_adapter_is_while_loads_are_about_equal():
    router, where = router_of(has_others=True), {"a": ["birds"]}
    for name in map(str, range(50)):
        assert router.rank(key(name), "birds", loads(64, where, a=20, b=12, c=12, d=12))[0] == "a"
        assert router.rank(key(name), "birds", loads(64, where, a=33, b=12, c=12, d=12))[0] != "a"


@pytest.mark.parametrize(("clients", "rows"), [(16, 8), (16, 64), (64, 64), (128, 64)])
@pytest.mark.parametrize("shared", ["instructions", "long instructions", "adapter", "instructions and adapter"])
def test_what_all_requests_share_does_not_send_them_all_to_one_replica(shared, clients, rows):
    """Every client asks something else behind the same instructions, or with the same adapter, as soon as it is
    answered; answers come in any order."""
    router, dice, adapters = router_of(), random.Random(0), {name: set() for name in REPLICAS}
    running, total = [], Counter()
    words = {"instructions": 348, "long instructions": 8000}.get(shared.removesuffix(" and adapter"), 0)
    adapter = "birds" if shared.endswith("adapter") else None
    for turn in range(20 * clients):
        if len(running) == clients:
            running.pop(dice.randrange(clients))
        prompt = {"prompt": "x" * words + f"question {turn} " * 40}
        keys = prefix_keys(prompt, [], adapter=adapter, tenant=None)
        chosen = router.rank(keys, adapter, loads(rows, adapters, **Counter(running)))[0]
        router.note(chosen, keys)
        adapters[chosen] |= {adapter} - {None}
        running.append(chosen)
        total[chosen] += 1
    spread = Counter(running)
    worth = min(ADAPTER_WORTH, rows // 4)
    assert max(spread.values()) - min(spread[name] for name in REPLICAS) <= (worth if adapter else 1)
    assert adapter or max(total.values()) <= 1.25 * total.total() / len(REPLICAS)


def test_a_conversation_goes_on_where_it_is_known_while_that_has_little_more_to_do():
    router, words = router_of(), "word " * 500
    keys = prefix_keys({"prompt": words + "and then? " * 50}, [], adapter=None, tenant=None)
    router.note("b", prefix_keys({"prompt": words}, [], adapter=None, tenant=None))
    known = router.num_known("b", keys)[1]
    assert known == len(words) // 256
    assert router.rank(keys, None, loads(64, a=4, b=3 + known, c=4, d=4))[0] == "b"
    assert router.rank(keys, None, loads(64, a=4, b=5 + known, c=4, d=4))[0] != "b"


def test_many_turns_of_a_conversation_count_as_one_request():
    router, words = router_of(), "word " * 100
    for turn in range(1, 40):
        router.note("b", prefix_keys({"prompt": words * turn}, [], adapter=None, tenant=None))
    keys = prefix_keys({"prompt": words * 40}, [], adapter=None, tenant=None)
    assert router.rank(keys, None, loads(64, b=15))[0] == "b"
    assert router.rank(keys, None, loads(64, b=17))[0] != "b"


def test_known_text_makes_up_for_a_quarter_of_a_batch_at_most():
    router = router_of()
    keys = prefix_keys({"prompt": "word " * 5000}, [], adapter=None, tenant=None)
    router.note("b", keys)
    assert router.rank(keys, None, loads(16, b=3))[0] == "b"
    assert router.rank(keys, None, loads(16, b=5))[0] != "b"


def test_several_routers_place_an_unknown_picture_alike_where_loads_are_about_equal():
    names = [f"picture {number}" for number in range(30)]
    one, other = router_of(has_others=True), router_of(has_others=True)
    for name in names:
        places = {router.rank(key(name), None, seen)[0] for router, seen in ((one, loads(16, a=3)), (other, loads(16)))}
        assert len(places) == 1
    alone = router_of()
    assert {alone.rank(key(name), None, loads(16, a=3, b=3, d=3))[0] for name in names} == {"c"}


def test_requests_without_keys_go_where_the_load_is_lowest_and_take_turns():
    router = router_of()
    assert router.rank(PrefixKeys(), None, loads(a=1, b=1, d=1))[0] == "c"
    firsts = Counter(router.rank(PrefixKeys(), None, loads())[0] for _ in range(200))
    assert set(firsts) == set(REPLICAS)


def test_a_replica_that_left_is_forgotten_and_not_ranked():
    router = router_of()
    router.note("a", key("p"))
    router.remove_replica("a")
    assert "a" not in router.rank(key("p"), None, loads())
    router.note("a", key("p"))
    router.add_replica("a")
    assert router.num_known("a", key("p")) == (0, 0)


def test_other_pictures_stay_where_they_are_when_a_replica_leaves():
    before = {name: router_of().rank(key(name), None, loads())[0] for name in map(str, range(50))}
    smaller = router_of(REPLICAS[1:])
    for name, replica in before.items():
        if replica != "a":
            assert smaller.rank(key(name), None, loads())[0] == replica


def test_memory_is_bounded_and_keeps_what_was_used_last():
    router = router_of(max_keys=100)
    for number in range(1000):
        router.note("a", key("kept"))
        router.note("a", key(str(number)))
    assert len(router._known["a"]) == 100
    assert router.num_known("a", key("kept")) == (1, 0)
    assert router.num_known("a", key("0")) == (0, 0)
