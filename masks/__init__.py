"""Masks that are ready to use.

A file holds one mask or a small family and is named after what it deals with, never after a mask,
so that `flashgen.masks.causal` is the mask and not a module. Functions named `from_*` make masks
of other libraries' forms; `natten` and `sliding_tile` take their geometry as tuples.
"""

from __future__ import annotations

from .attention_slices import from_slices, slices
from .block_diffusions import block_diffusion
from .block_tables import block_padding, block_sparse, blocks_from_indices
from .canvases import morton_order, natten, sliding_tile, tile_order
from .causal_blocks import causal_blockwise
from .causality import bottom_right, causal, top_left
from .chunks import chunked
from .dense_tables import dense_table, from_dense
from .dilated_windows import dilated_window, strided
from .documents import causal_document, document
from .draft_blocks import draft_block
from .dropped_segments import qk_sparse
from .evictions import random_eviction
from .examples import EXAMPLES
from .flashmask_columns import flashmask, from_flashmask
from .flex_masks import from_block_mask
from .global_windows import global_local, global_tokens, global_window
from .hash_buckets import hash_sparse
from .local_windows import local
from .media import flamingo
from .neighborhoods import natten_1d, natten_2d, natten_3d, natten_ordered
from .packed_sequences import (
    block_diagonal,
    block_diagonal_causal,
    block_diagonal_local,
    block_diagonal_window,
)
from .paddings import left_padding, padding
from .prefix_documents import prefix_document
from .prefixes import prefix_lm
from .sequence_lengths import from_cu_seqlens, from_seqlens
from .shared_prefixes import shared_prefix
from .shared_questions import shared_question
from .sliding_tiles import sliding_tile_2d, sliding_tile_3d
from .sliding_windows import sliding_window
from .trees import tree, tree_dfs
from .video_heads import spatial_head, temporal_head
from .xformers_biases import from_xformers

__all__ = [
    "EXAMPLES",
    "block_diagonal",
    "block_diagonal_causal",
    "block_diagonal_local",
    "block_diagonal_window",
    "block_diffusion",
    "block_padding",
    "block_sparse",
    "blocks_from_indices",
    "bottom_right",
    "causal",
    "causal_blockwise",
    "causal_document",
    "chunked",
    "dense_table",
    "dilated_window",
    "document",
    "draft_block",
    "flamingo",
    "flashmask",
    "from_block_mask",
    "from_cu_seqlens",
    "from_dense",
    "from_flashmask",
    "from_seqlens",
    "from_slices",
    "from_xformers",
    "global_local",
    "global_tokens",
    "global_window",
    "hash_sparse",
    "left_padding",
    "local",
    "morton_order",
    "natten",
    "natten_1d",
    "natten_2d",
    "natten_3d",
    "natten_ordered",
    "padding",
    "prefix_document",
    "prefix_lm",
    "qk_sparse",
    "random_eviction",
    "shared_prefix",
    "shared_question",
    "slices",
    "sliding_tile",
    "sliding_tile_2d",
    "sliding_tile_3d",
    "sliding_window",
    "spatial_head",
    "strided",
    "temporal_head",
    "tile_order",
    "top_left",
    "tree",
    "tree_dfs",
]
