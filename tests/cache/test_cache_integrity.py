"""The integrity check itself: each kind of damage is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kestrel.cache import CacheManager, PageLease
from kestrel.cache.radix import RadixNode, RadixPrefixCache, RadixRoot
from kestrel.tokens import TextToken

from .builders import BASE, nodes_by_span, open_lease, remember, text


class Scene:
    """A healthy cache with an unlocked pair of nodes, a locked one and one lease."""

    def __init__(self) -> None:
        self.manager = CacheManager(num_pages=32, page_size=2)
        remember(self.manager, text(1, 2, 3, 4, 5))
        remember(self.manager, text(1, 2, 3, 8, 9, 9, 9))
        remember(self.manager, text(50, 51))
        self.lease: PageLease = open_lease(self.manager, text(50, 51, 52))
        assert isinstance(self.manager._prefixes, RadixPrefixCache)
        self.prefixes: RadixPrefixCache = self.manager._prefixes
        nodes = nodes_by_span(self.manager)
        self.parent: RadixNode = nodes[0, 3]
        self.leaf: RadixNode = nodes[3, 5]
        self.locked: RadixNode = nodes[0, 2]


def drop_leaf(scene: Scene) -> None:
    del scene.parent.children[4]


def wrong_key(scene: Scene) -> None:
    scene.parent.children[77] = scene.parent.children.pop(4)


def wrong_parent(scene: Scene) -> None:
    scene.leaf.parent = scene.locked


def wrong_end(scene: Scene) -> None:
    scene.leaf.end += 1


def wrong_start(scene: Scene) -> None:
    scene.leaf.start += 1


def empty_node(scene: Scene) -> None:
    scene.leaf.keys = ()


def missing_page(scene: Scene) -> None:
    scene.leaf.pages.pop()


def swapped_page(scene: Scene) -> None:
    scene.leaf.pages[-1] = scene.locked.pages[0]


def wrong_own_pages(scene: Scene) -> None:
    scene.leaf.num_own_pages += 1


def lost_lock(scene: Scene) -> None:
    scene.locked.locks -= 1


def extra_lock(scene: Scene) -> None:
    scene.leaf.locks += 1


def not_in_order(scene: Scene) -> None:
    scene.prefixes._unlocked.remove(scene.leaf)


def parent_before_child(scene: Scene) -> None:
    scene.prefixes._unlocked.remove(scene.leaf)
    scene.prefixes._unlocked.add(scene.leaf, scene.leaf.num_own_pages)


def foreign_node_in_order(scene: Scene) -> None:
    scene.prefixes._unlocked.add(RadixNode(scene.parent, (5,), 3, 4, [0]), 0)


def wrong_evictable_sum(scene: Scene) -> None:
    scene.prefixes._unlocked.num_pages += 1


def wrong_cached_sum(scene: Scene) -> None:
    scene.prefixes._num_cached_pages += 1


def empty_namespace(scene: Scene) -> None:
    scene.prefixes._roots["empty"] = RadixRoot("empty")


def misfiled_namespace(scene: Scene) -> None:
    scene.prefixes._roots["other"] = scene.prefixes._roots.pop(BASE)


def lost_reference(scene: Scene) -> None:
    scene.manager._pool.release(scene.leaf.pages[-1:])


def extra_reference(scene: Scene) -> None:
    scene.manager._pool.retain(scene.leaf.pages[-1:])


def page_twice_in_lease(scene: Scene) -> None:
    scene.lease.pages.append(scene.lease.pages[-1])
    scene.manager._pool.retain(scene.lease.pages[-1:])


def two_writers(scene: Scene) -> None:
    other = open_lease(scene.manager, [TextToken(90)])
    scene.manager._pool.retain(other.pages)
    scene.lease.pages += other.pages


def lease_on_evictable_page(scene: Scene) -> None:
    scene.manager._pool.retain(scene.leaf.pages[-1:])
    scene.lease.pages += scene.leaf.pages[-1:]


def forgotten_lease(scene: Scene) -> None:
    scene.manager._leases.clear()


def foreign_copy_target(scene: Scene) -> None:
    scene.lease.copies.append((scene.locked.pages[0], scene.leaf.pages[0]))


def vanished_copy_source(scene: Scene) -> None:
    scene.lease.copies.append((31, scene.lease.pages[-1]))


DAMAGES = [
    drop_leaf, wrong_key, wrong_parent, wrong_end, wrong_start, empty_node, missing_page, swapped_page, wrong_own_pages,
    lost_lock, extra_lock, not_in_order, parent_before_child, foreign_node_in_order, wrong_evictable_sum,
    wrong_cached_sum, empty_namespace, misfiled_namespace, lost_reference, extra_reference, page_twice_in_lease,
    two_writers, lease_on_evictable_page, forgotten_lease, foreign_copy_target, vanished_copy_source,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found(damage: Callable[[Scene], None]) -> None:
    scene = Scene()
    scene.manager.check_integrity()
    damage(scene)
    with pytest.raises(AssertionError, match=r"\w"):
        scene.manager.check_integrity()
