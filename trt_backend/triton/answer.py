"""The answer of one request as it grows: tokens in, pieces for responses out."""

from __future__ import annotations

from trt_backend.request import Output, TokenLogprob
from trt_backend.triton.outputs import TEXT_OUTPUTS, Ended, Piece
from trt_backend.triton.parse import Shape
from trt_backend.triton.text import Detokenizer, StopFinder, Tokenizer


class Answer:
    """Collects what a request makes until it can be shown.

    `complete` is set when a stop string has ended the text: tokens that come after it are dropped.
    """

    def __init__(self, shape: Shape, tokenizer: Tokenizer) -> None:
        self._shape = shape
        self._detokenizer = Detokenizer(tokenizer)
        self._finder = StopFinder(shape.stops, shape.keep_stop) if shape.stops else None
        self._shows_text = bool(shape.outputs & TEXT_OUTPUTS)
        self._piece = Piece(shape.echo, list(shape.prompt), prompt_tokens=shape.prompt_tokens)
        self._logprob = 0.0
        self.prompt_tokens = shape.prompt_tokens
        self.generated = 0
        self.complete = False

    def add(self, output: Output) -> bool:
        """Take what a step made. True once: when with it a stop string has completed the answer."""
        if self.complete:
            return False
        if output.prompt_logprobs is not None:
            self._piece.prompt_logprobs = output.prompt_logprobs
        if self._finder is None:
            self._piece.text += self._detokenizer.push(self._visible(output.tokens))
            self._keep(output.tokens, output.logprobs)
            return False
        for number, token in enumerate(output.tokens):
            self._keep((token,), output.logprobs[number : number + 1])
            text = self._detokenizer.push(self._visible((token,)))
            shown, self.complete = self._finder.push(text, may_stop=self.generated >= self._shape.min_tokens)
            self._piece.text += shown
            if self.complete:
                return True
        return False

    def take(self) -> Piece | None:
        """What can be sent now; None where there is nothing to show, or all is to come in one response."""
        shown = self._piece.text if self._shows_text else self._piece.tokens
        if not self._shape.in_pieces or not shown or not self.generated:
            return None
        return self._take()

    def take_last(self, end: Ended) -> Piece:
        """All that is left, for the last response."""
        if not self.complete:
            rest = self._detokenizer.flush()
            if self._finder is not None:
                shown, self.complete = self._finder.push(rest, may_stop=self.generated >= self._shape.min_tokens)
                rest = shown if self.complete else shown + self._finder.flush()
            self._piece.text += rest
        self._piece.end = end
        return self._take()

    def _take(self) -> Piece:
        piece, self._piece = self._piece, Piece(prompt_tokens=self.prompt_tokens)
        piece.logprob = self._logprob
        return piece

    def _keep(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        self.generated += len(tokens)
        self._piece.tokens.extend(tokens)
        self._piece.logprobs.extend(logprobs)
        for entry in logprobs:
            self._logprob += entry.logprob

    def _visible(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """An end token ends the text and is no part of it. It can only be the last one."""
        return tokens[:-1] if tokens and tokens[-1] in self._shape.end_ids else tokens
