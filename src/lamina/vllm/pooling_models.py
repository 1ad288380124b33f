"""Readers of encoders and embedding models: answers over whole texts, from the pass that computes the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lamina.bank.stack_pass import StackPass
from lamina.data.batches import Budget, length_batches
from lamina.errors import ConfigError
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.vllm.layout import Layout
from lamina.vllm.taps import tap
from lamina.vllm.worker import StepScores, load_bank

if TYPE_CHECKING:
    from jaxtyping import Float

    from lamina.bank import ReaderBank
    from lamina.layers import LayerStack
    from lamina.vllm.engine_types import Runner


_OVERHEAD = 64  # fixed cost of a pass of the readers, in tokens, with which texts are grouped by length


@final
class TextReaders:
    """The readers of a bank in one engine of a pooling model. They read each text once its last token is computed.

    Making it installs `Taps` in the runner's model. Raises ConfigError if a reader cannot run in such an engine, and
    BaseMismatchError if the bank was trained on another model.
    """

    method: ClassVar[str] = "_pool"

    def __init__(self, layout: Layout, runner: Runner) -> None:
        self._layout, self._runner = layout, runner
        bank, stack = load_bank(layout, runner, _check_readers)
        readers = {name: bank[name].to(runner.device) for name in layout.readers}
        self._pass = StackPass(bank.model, stack, readers, grad=False, processor=bank.processor)
        self._taps = tap(runner, stack)
        self._depth = stack.depth
        self._begun: dict[str, list[Tensor]] = {}  # request id -> states of its text so far, by layer

    @torch.inference_mode()
    def read_step(self, hidden: Float[Tensor, "padded width"], tokens: int, *_args: object) -> dict[str, StepScores]:
        """Return request id -> scores, for the texts whose last token is in the step that was just computed.

        `hidden` has the last layer's states of all requests one after the other; the first `tokens` are not padding.
        The states of texts that have not ended are kept for the next step. Raises RuntimeError if states of a text are
        missing.
        """
        batch = self._runner.input_batch
        states = [*self._taps.states(range(self._depth), tokens), hidden[:tokens]]
        scheduled = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        ended: dict[str, list[Tensor]] = {}
        ids: dict[str, Tensor] = {}
        begun: dict[str, list[Tensor]] = {}
        for row, request in enumerate(batch.req_ids):
            first, end = scheduled[row], scheduled[row + 1]
            before = int(batch.num_computed_tokens_cpu[row])
            whole = [state[first:end] for state in states]
            if before and request in self._begun:
                whole = [torch.cat(parts) for parts in zip(self._begun[request], whole, strict=True)]
            read, prompt = before + end - first, int(self._runner.requests[request].num_prompt_tokens)
            if len(whole[0]) != read:
                raise RuntimeError(f"vllm: readers got {len(whole[0])} of the {read} tokens of request {request}.")
            if read < prompt:
                begun[request] = [part.clone() for part in whole]
            else:
                ended[request], ids[request] = whole, torch.from_numpy(batch.token_ids_cpu[row, :read].copy())
        # a text whose turn did not come in this step goes on later
        going_on = self._begun.keys() & self._runner.requests.keys() - ended.keys()
        self._begun = {request: self._begun[request] for request in going_on} | begun
        scores: dict[str, StepScores] = {}
        requests, budget = list(ids), Budget(self._runner.max_num_tokens, _OVERHEAD)
        for rows in length_batches(list(map(len, ids.values())), len(ids) or 1, budget=budget):
            group = [requests[row] for row in rows]
            scores |= self._answer({request: ended[request] for request in group}, [ids[request] for request in group])
        return scores

    def _answer(self, texts: dict[str, list[Tensor]], ids: Sequence[Tensor]) -> dict[str, StepScores]:
        """Let the readers read finished texts, padded to the longest of them; return request id -> their scores.

        `texts` is request id -> the states of all layers, each `[tokens, width]`; `ids` has each text's token ids.
        """
        device = self._runner.device
        mask = pad_sequence([torch.ones_like(part) for part in ids], batch_first=True).to(device)
        tokens = pad_sequence(list(ids), batch_first=True).to(device)
        stack_pass = self._pass.restart()
        stack_pass.begin({"input_ids": tokens, "attention_mask": mask})
        for layer in stack_pass.layers:
            stack_pass.on_state(layer, pad_sequence([states[layer] for states in texts.values()], batch_first=True))
        outputs = {name: logits.float().cpu() for name, logits in stack_pass.finish().items()}
        whole = [outputs[name] for name in self._layout.names(whole=True)]
        single = [outputs[name] for name in self._layout.names(whole=False)]
        empty = torch.empty(len(ids), mask.shape[1], 0)
        whole_rows, token_rows = torch.cat([empty[:, 0], *whole], -1), torch.cat([empty, *single], -1)
        return {
            request: StepScores(
                0, token_rows[row, : len(ids[row])].numpy().tobytes(), whole_rows[row].numpy().tobytes()
            )
            for row, request in enumerate(texts)
        }


def _check_readers(bank: ReaderBank, _stack: LayerStack, layout: Layout) -> None:
    """Raise ConfigError if a reader has a head that is not for sequence or token classification."""
    for name in layout.readers:
        head = bank[name].config.head
        if not isinstance(head, SequenceClassification | TokenClassification):
            raise ConfigError(
                f"vllm: reader '{name}' has a head of the kind {head.kind} for a vocabulary. Leave it out."
            )
