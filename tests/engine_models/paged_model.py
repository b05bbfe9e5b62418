"""A model of ours over a pool of pages, driven step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from splitserve.engine.batch import build_batch
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.registry import build_model
from splitserve.engine.protocol import PageId, RequestId
from splitserve.engine.step import Chunk
from splitserve.engine.weights.loading import load_weights
from splitserve.engine.weights.model_files import ModelFiles

PAGE_TOKENS = 4
PAGES_EACH = 16

Piece = tuple[int, int]  # (sequence, tokens of it)


@dataclass(frozen=True)
class PagedModel:
    """On the CPU; each sequence owns pages of its own, in no order."""

    files: ModelFiles
    platform: Platform

    def logits(
        self, sequences: Sequence[Sequence[int]], steps: Sequence[Sequence[Piece]]
    ) -> Mapping[int, torch.Tensor]:
        """Logits after every token of each sequence, [tokens, vocab_size], computed in the pieces of ``steps``."""
        platform, config = self.platform, self.files.config
        pages = list(range(PAGES_EACH * len(sequences)))
        Random(5).shuffle(pages)
        tables = [[PageId(pages.pop()) for _ in range(PAGES_EACH)] for _ in sequences]
        done = [0] * len(sequences)
        parts: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(sequences))}
        with torch.inference_mode():
            model = build_model(config, platform)
            load_weights(self.files, model.destinations())
            model.pack()
            shape = (PAGES_EACH * len(sequences), config.layers, 2, config.kv_heads, PAGE_TOKENS, config.head_dim)
            pool = torch.zeros(shape, dtype=platform.dtype)
            for step in steps:
                chunks = []
                for number, count in step:
                    start, tokens = done[number], sequences[number]
                    chunks.append(
                        Chunk(RequestId(str(number)), tokens[start : start + count], start, tables[number], None)
                    )
                    done[number] += count
                batch = build_batch(chunks, PAGE_TOKENS, platform.device, platform.operations)
                logits = model.logits(model.forward(batch, pool))
                for (number, _), rows in zip(step, batch.chunk_rows, strict=True):
                    parts[number].append(logits[rows])
        return {number: torch.cat(own) for number, own in parts.items()}
