"""Every mask with random data and its oracle, for whatever is to be tested on all of them.

`CASES` are `Case(id, mask, build, oracle)`: `build(B, H, Sq, Skv, generator)` gives the mask's
data, `oracle(b, h, i, j, data)` its matrix (see oracles.py; `h` is the head of queries and keys).
`mask(**data)` binds the data: a mask of another library's form is a function of the same shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import oracles
import table_oracles
import torch
from mask_data import (
    Build,
    block_diffusion,
    block_padding,
    blocks,
    blockwise,
    blockwise_int,
    chunk,
    cu_seqlens,
    dense,
    dense_flat,
    dilated,
    doc,
    doc_shared,
    doc_unordered,
    draft_block,
    eviction,
    flamingo,
    flashmask,
    from_flashmask,
    global_local,
    global_window,
    is_global,
    left_padding,
    local,
    local_strided,
    longformer,
    merged,
    natten,
    natten_ordered,
    nothing,
    number,
    packed,
    padding,
    padding_int,
    prefix_document,
    prefix_each,
    prefix_int,
    qk_sparse,
    shared_prefix,
    shared_question,
    slice_tables,
    slices,
    spatial,
    staircase,
    temporal,
    tiles,
    tree,
    tree_dfs,
    window,
)

from flashgen import masks


class Case(NamedTuple):
    """A mask, how to make its data, and what it means."""

    id: str
    mask: Any
    build: Build
    oracle: oracles.Oracle
    # The dimensions its oracle varies along, and whether positions below 0 (Sq > Skv) make sense.
    varies: str = ""
    below_zero: bool = True

    def bound(self, data: dict[str, Any]) -> Any:
        """The mask with its data."""
        return self.mask(**data)

    def expected(
        self, batch: int, heads: int, q_len: int, kv_len: int, data: dict[str, Any]
    ) -> torch.Tensor:
        """The oracle's matrix [B, H, Sq, Skv], the queries being the last positions."""
        b = torch.arange(batch if "b" in self.varies else 1).reshape(-1, 1, 1, 1)
        h = torch.arange(heads if "h" in self.varies else 1).reshape(1, -1, 1, 1)
        i = torch.arange(kv_len - q_len, kv_len).reshape(1, 1, -1, 1)
        j = torch.arange(kv_len).reshape(1, 1, 1, -1)
        return self.oracle(b, h, i, j, data).expand(batch, heads, q_len, kv_len)


CASES: list[Case] = [
    Case("causal", masks.causal, nothing, oracles.causal),
    Case("top_left", masks.top_left, nothing, oracles.top_left),
    Case("bottom_right", masks.bottom_right, nothing, oracles.bottom_right),
    Case("sliding_window", masks.sliding_window, window, oracles.sliding_window),
    Case("local", masks.local, local, oracles.local),
    Case("dilated_window", masks.dilated_window, dilated, oracles.dilated_window),
    Case("strided", masks.strided, lambda *a: {"dilation": number(1, 9, a[-1])}, oracles.strided),
    Case("local & strided", masks.local & masks.strided, local_strided, oracles.local_strided),
    Case("global_window", masks.global_window, global_window, oracles.global_window),
    Case("global_local", masks.global_local, global_local, oracles.global_local),
    Case("global_tokens", masks.global_tokens, is_global, oracles.global_tokens, "b"),
    Case(
        "local | global_tokens",
        masks.local | masks.global_tokens,
        longformer,
        oracles.longformer,
        "b",
    ),
    Case("prefix_lm-int", masks.prefix_lm, prefix_int, oracles.prefix_lm),
    Case("prefix_lm-each", masks.prefix_lm, prefix_each, oracles.prefix_lm, "b"),
    Case("document", masks.document, doc, oracles.document, "b"),
    Case("document-shared", masks.document, doc_shared, oracles.document),
    Case("document-unordered", masks.document, doc_unordered, oracles.document, "b"),
    Case("~document", ~masks.document, doc, oracles.inverted(oracles.document), "b"),
    Case("causal_document", masks.causal_document, doc, oracles.causal_document, "b"),
    Case("causal & document", masks.causal & masks.document, doc, oracles.causal_document, "b"),
    Case("prefix_document", masks.prefix_document, prefix_document, oracles.prefix_document, "b"),
    Case("padding", masks.padding, padding, oracles.padding, "b"),
    Case("padding-int", masks.padding, padding_int, oracles.padding),
    Case("left_padding", masks.left_padding, left_padding, oracles.left_padding, "b"),
    Case("causal & padding", masks.causal & masks.padding, padding, oracles.causal_padding, "b"),
    Case(
        "document & padding",
        masks.document & masks.padding,
        merged(doc, padding),
        oracles.both(oracles.document, oracles.padding),
        "b",
    ),
    Case("shared_question", masks.shared_question, shared_question, oracles.shared_question, "b"),
    Case("causal_blockwise", masks.causal_blockwise, blockwise, oracles.causal_blockwise, "b"),
    Case(
        "causal_blockwise-int",
        masks.causal_blockwise,
        blockwise_int,
        oracles.causal_blockwise,
        "b",
    ),
    Case("qk_sparse", masks.qk_sparse, qk_sparse, oracles.qk_sparse, "b"),
    Case("hash_sparse", masks.hash_sparse, staircase, oracles.hash_sparse, "bh"),
    Case("random_eviction", masks.random_eviction, eviction, oracles.random_eviction, "bh"),
    *(
        Case(
            f"flashmask-{'causal' if causal else 'full'}-{count}{'-shared' if heads else ''}",
            masks.flashmask,
            flashmask(causal, count, heads),
            table_oracles.flashmask,
            "b" if heads else "bh",
        )
        for causal, count in ((True, 1), (True, 2), (False, 2), (False, 4))
        for heads in (None, 1)
    ),
    Case(
        "flashmask-per_query_head",
        masks.flashmask,
        flashmask(True, 1, per_query_head=True),
        table_oracles.flashmask,
        "bh",
    ),
    Case(
        "flashmask-by_row",
        masks.flashmask,
        flashmask(False, 4, by_row=True),
        table_oracles.flashmask,
        "bh",
    ),
    *(
        Case(
            f"from_flashmask-{'causal' if causal else 'full'}-{count}",
            masks.from_flashmask,
            from_flashmask(causal, count),
            table_oracles.from_flashmask,
            "bh",
        )
        for causal, count in ((True, 1), (True, 2), (False, 2), (False, 4))
    ),
    Case("chunked", masks.chunked, chunk, oracles.chunked),
    Case("block_sparse", masks.block_sparse, blocks, oracles.block_sparse, "bh"),
    Case("block_padding", masks.block_padding, block_padding, oracles.block_padding),
    Case("tree", masks.tree, tree, oracles.tree, "b"),
    Case("tree_dfs", masks.tree_dfs, tree_dfs, oracles.tree_dfs, "b"),
    Case("shared_prefix", masks.shared_prefix, shared_prefix, oracles.shared_prefix, "b"),
    Case("block_diffusion", masks.block_diffusion, block_diffusion, oracles.block_diffusion),
    Case("draft_block", masks.draft_block, draft_block, oracles.draft_block, "b"),
    Case("spatial_head", masks.spatial_head, spatial, oracles.spatial_head),
    Case("temporal_head", masks.temporal_head, temporal, oracles.temporal_head),
    Case("flamingo", masks.flamingo, flamingo, oracles.flamingo, "b"),
    Case("natten_1d", masks.natten_1d, natten(""), oracles.natten(""), "", False),
    Case("natten_2d", masks.natten_2d, natten("hw"), oracles.natten("hw"), "", False),
    Case("natten_3d", masks.natten_3d, natten("dhw"), oracles.natten("dhw"), "", False),
    Case("natten_ordered", masks.natten_ordered, natten_ordered, oracles.natten("dhw"), "", False),
    Case(
        "sliding_tile_2d", masks.sliding_tile_2d, tiles("hw"), oracles.sliding_tile("hw"), "", False
    ),
    Case(
        "sliding_tile_3d",
        masks.sliding_tile_3d,
        tiles("dhw"),
        oracles.sliding_tile("dhw"),
        "",
        False,
    ),
    Case("slices", masks.slices, slice_tables, table_oracles.slice_tables),
    Case("from_slices", masks.from_slices, slices, table_oracles.slices),
    *(
        Case(
            f"from_seqlens-{layout}{name}",
            masks.from_seqlens,
            packed(layout, **more),
            table_oracles.packed,
        )
        for layout in ("packed", "padded", "gappy")
        for name, more in (
            ("", {}),
            ("-causal", {"causal": True}),
            ("-top_left", {"causal": True, "top_left": True}),
            ("-window", {"window": 3}),
            ("-window-top_left", {"window": 3, "top_left": True}),
            ("-local", {"window": (2, 3)}),
        )
    ),
    *(
        Case(
            f"from_cu_seqlens{name}",
            masks.from_cu_seqlens,
            cu_seqlens(**more),
            table_oracles.cu_seqlens,
        )
        for name, more in (
            ("", {}),
            ("-causal", {"causal": True}),
            ("-window", {"window": 5}),
            ("-local", {"window": (4, 0)}),
        )
    ),
    Case("from_dense", masks.from_dense, dense, oracles.dense, "bh"),
    Case("from_dense-2d", masks.from_dense, dense_flat, oracles.dense),
    Case("causal | ~causal", masks.causal | ~masks.causal, nothing, oracles.everything),
]
