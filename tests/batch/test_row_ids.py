"""What a job remembers of its rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raytp.batch_job.row_ids import IdSet, OrdinalSet, pack_ranges, unpack_ranges


@settings(deadline=None)
@given(st.sets(st.integers(0, 5000)))
def test_ordinals_survive_packing(ordinals):
    packed, bitmap = pack_ranges(ordinals), OrdinalSet()
    for first, last in unpack_ranges(packed):
        bitmap.add_range(first, last)
    assert {i for i in range(6000) if i in bitmap} == ordinals


@settings(deadline=None)
@given(st.lists(st.text(max_size=2)))
def test_an_id_is_new_once(ids):
    seen = IdSet()
    assert [seen.add(each) for each in ids] == [each not in ids[:i] for i, each in enumerate(ids)]
    seen.close()
