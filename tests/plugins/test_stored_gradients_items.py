"""The items of gradients by way of memory without a GPU: each once, and what is read of P and dS was written."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from on_numbers import on_numbers

from registry.plugins.triton_fa2.stored import configs, pieces, specialised_product, specialised_weights

LENGTHS = [(1, 1), (64, 128), (1000, 1000), (300, 777), (777, 300), (5, 900), (900, 5)]
BOUNDS = [(-1, -1), (-1, 0), (0, 0), (100, 50), (300, -1), (-1, 300), (0, 700), (2000, 3)]


product_at, rows_seeing, keys_seen = (
    on_numbers(specialised_product, name) for name in ("item_at", "rows_seeing", "keys_seen")
)
tiles_seen = on_numbers(pieces, "tiles_seen")
weights_at = on_numbers(specialised_weights, "item_at", tiles_seen=tiles_seen)


@pytest.mark.parametrize(
    "group, key_tiles, tiles_q, heads, section", [(1, 8, 5, 3, 2), (1, 4, 9, 2, 2), (4, 6, 3, 5, 2)]
)
def test_each_tile_of_each_gradient_is_one_item(group, key_tiles, tiles_q, heads, section):
    t = configs.ProductTraits(128, 3, 256, 256, 0, 2, 1, group, False, True, False, False)
    work = (heads, 0, 0, tiles_q, key_tiles, section, 0)
    found = [product_at(item, work, t) for item in range(t.items(heads, key_tiles, tiles_q))]
    keys = [(head, 0, tile) for head in range(heads) for tile in range(key_tiles)]
    rows = [*itertools.product(range(heads), range(group), range(tiles_q))]
    wanted = [(0, *one, 0) for one in keys] + [(1, *one, part) for one in keys for part in (0, 1)]
    wanted += [(2, *one, part) for one in rows for part in (0, 1)]
    assert sorted(one for one in found if one[0] != specialised_product.NONE.value) == sorted(wanted)
    of_rows = [tile for what, head, _, tile, part in found if (what, head, part) == (2, 0, 0)]
    assert of_rows == sorted(of_rows, reverse=True), "under a causal mask the last rows see most"


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("tile", [128, 256])
def test_boxes_that_are_read_were_written_and_hold_all_that_is_seen(tile, bounds):
    left, right = bounds
    t = SimpleNamespace(BLOCK_N=tile, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0)
    for seqlen_q, seqlen_k in LENGTHS:
        sizes = (seqlen_q, seqlen_k, left, right)
        tiles_q, all_tiles = -(-seqlen_q // 128), -(-seqlen_k // tile)
        half = max(1, all_tiles // 2)
        for first, tiles in {(0, all_tiles), (0, half), (half, all_tiles - half)}:
            if not tiles:
                continue
            counts = (first, tiles_q, tiles, 2, tiles_q * -(-tiles // 2))
            written = set()
            for item in range(counts[-1]):
                head, row, low, high = weights_at(item, counts, sizes, t)
                assert head == 0
                written |= {
                    *itertools.product(range(row // 64, row // 64 + 2), range(low * tile // 64, high * tile // 64))
                }
            chunk = range(first * tile, (first + tiles) * tile)
            by_keys, by_rows = set(), set()
            for key in range(chunk.start, chunk.stop, 128):
                start, count = rows_seeing(key, sizes, t)
                by_keys |= {*itertools.product(range(start // 64, start // 64 + count), (key // 64, key // 64 + 1))}
            for row in range(0, tiles_q * 128, 128):
                start, count = keys_seen(row, chunk.start, len(chunk), sizes, t)
                by_rows |= {*itertools.product((row // 64, row // 64 + 1), range(start // 64, start // 64 + count))}
            assert by_keys | by_rows <= written
            shift = seqlen_k - seqlen_q
            seen = {
                (row // 64, key // 64)
                for row in range(seqlen_q)
                for key in range(
                    max(chunk.start, row + shift - left if left >= 0 else 0),
                    min(chunk.stop, seqlen_k, row + shift + right + 1 if right >= 0 else seqlen_k),
                )
            }
            assert seen <= by_keys and seen <= by_rows
