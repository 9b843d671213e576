"""Keys say how far two requests begin alike."""

from kestrel.routing import prefix_keys
from kestrel.routing.prefixes import BLOCK_BYTES, MAX_BLOCKS

LONG = "word " * BLOCK_BYTES


def keys(pictures=(), adapter=None, tenant=None, **fields):
    return list(beginnings(pictures, adapter, tenant, **fields))


def beginnings(pictures=(), adapter=None, tenant=None, **fields):
    return prefix_keys(fields, pictures, adapter=adapter, tenant=tenant)


def num_common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_questions_about_one_picture_share_its_key_and_none_of_another_picture():
    one, two = keys(["p"], question="what is it?"), keys(["p"], question="which colour?")
    assert one == two
    assert len(one) == 1
    assert num_common(one, keys(["q"], question="what is it?")) == 0


def test_further_pictures_and_blocks_extend_the_chain():
    both = beginnings(["p", "q"], prompt=LONG)
    assert (len(both.pictures), len(both.blocks)) == (2, len(LONG) // BLOCK_BYTES)
    assert keys(["p", "q"])[:1] == keys(["p"])
    assert num_common(keys(prompt=LONG + "a" * 500), keys(prompt=LONG + "b" * 500)) == len(LONG) // BLOCK_BYTES


def test_a_conversation_that_goes_on_begins_with_its_earlier_keys():
    turns = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}]
    before = keys(messages=turns[:1])
    assert keys(messages=[*turns, {"role": "user", "content": "and?"}])[: len(before)] == before
    assert before


def test_ids_count_as_text_does():
    ids = list(range(1000, 1400))
    assert keys(prompt=ids)[:2] == keys(prompt=ids[:300])[:2]
    assert num_common(keys(prompt=ids), keys(prompt=[7, *ids])) == 0


def test_other_tenants_adapters_and_salts_share_nothing():
    variants = [{}, {"tenant": "t"}, {"adapter": "t"}, {"cache_salt": "t"}]
    firsts = {keys(["p"], prompt=LONG, **variant)[0] for variant in variants}
    assert len(firsts) == len(variants)


def test_a_long_prompt_has_a_bounded_number_of_keys_and_pictures_in_messages_are_only_marked():
    assert len(keys(prompt="x" * 10_000_000)) == MAX_BLOCKS
    part = {"type": "image", "image": b"\x89PNG"}
    other = {"type": "image", "image": b"\xff\xd8"}
    assert keys(["p"], messages=[{"role": "user", "content": [part, {"type": "text", "text": LONG}]}]) == keys(
        ["p"], messages=[{"role": "user", "content": [other, {"type": "text", "text": LONG}]}]
    )
