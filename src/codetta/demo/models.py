"""The models of the demo: one source, and from it the model of each run.

- stock: the Hugging Face model as it is, run eagerly;
- CODA: the same model through `codetta.compile`, or its parameters under `codetta.nn.Decoder`;
- the yardstick: the same model in fp64, against which gradients are measured.

All start from the same fp32 weights, rounded to their own dtype (the yardstick has the rounded
weights of the run that it measures). In all of them the rotary angles are computed in fp32 and only
then cast, as transformers does.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from codetta.demo.kernels import CostRow
from codetta.demo.weights import MODEL_NAME, fetch_weights
from codetta.errors import MissingPackage

Loss = Callable[[torch.Tensor], torch.Tensor]  # input_ids (batch, seq) -> mean loss, a scalar


@dataclass(frozen=True)
class Source:
    """What every run starts from."""

    name: str
    model: Any  # a transformers LlamaForCausalLM, fp32, on the CPU
    encode: Callable[[str], Sequence[int]]  # text to token numbers

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def pretrained(say: Callable[[str], None] = lambda message: None) -> Source:
    """SmolLM2-135M-Instruct with its 4-bit weights dequantized to fp32; about 20 seconds."""
    transformers = _transformers()
    gguf = fetch_weights(say)
    say(f"loading {MODEL_NAME} (4-bit weights to fp32)")
    with _silent(transformers):
        where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return Source(
        MODEL_NAME, model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    )


def small_random(seed: int) -> Source:
    """A Llama of 1.2 million random parameters whose tokens are bytes.

    Its vocabulary is wide against its hidden size, as in real models, so that its head is compiled
    as theirs are: as a plain product.
    """
    transformers = _transformers()
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    return Source("a small random Llama", model, lambda text: list(text.encode()))


def through_coda(model: Any) -> Any:
    """The CODA decoder over `model`'s own parameters, under their own names.

    Called as `decoder(input_ids=..., labels=...)`, it returns an object with `.loss`; and
    `decoder.cost_table(tokens=M, positions=seq, dtype=...)` lists its layers' kernels as rows with
    `.kind`, `.name`, `.bytes` (of one launch) and `.count`.
    """
    from codetta.nn import Decoder

    return Decoder.from_hf(model)


def coda_table(decoder: Any, dtype: torch.dtype) -> Callable[[int, int], Sequence[CostRow]]:
    """(batch, seq) -> the cost table of the decoder's layers."""
    return lambda batch, seq: decoder.cost_table(tokens=batch * seq, positions=seq, dtype=dtype)


def copy_of(model: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A copy with parameters of `dtype` on `device`.

    Buffers keep their dtype: `model.to(dtype)` would round the rotary frequencies as well.
    """
    twin = copy.deepcopy(model).to(device)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin.train()


def hf_loss(model: Any) -> Loss:
    """Plain Hugging Face; without a cache, as in training."""
    return lambda input_ids: model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def coda_loss(decoder: Any) -> Loss:
    return lambda input_ids: decoder(input_ids=input_ids, labels=input_ids).loss


def fp64_gradients(
    model: Any, input_ids: torch.Tensor, device: torch.device
) -> dict[str, torch.Tensor]:
    """{parameter name: fp64 gradient on the CPU} of the mean loss, computed in fp64 throughout.

    transformers computes norms and loss in fp32 even in an fp64 model, which would limit this
    yardstick to 1e-7. So in this copy (nowhere else) the norms are replaced and the loss is taken
    from the logits.
    """
    device = device if device.type != "mps" else torch.device("cpu")  # mps has no fp64
    twin = copy_of(model, torch.float64, device)
    _replace_norms(twin)
    input_ids = input_ids.to(device)
    logits = twin(input_ids=input_ids, use_cache=False).logits
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    return {name: p.grad.cpu() for name, p in twin.named_parameters() if p.grad is not None}


def _replace_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon") and isinstance(child.weight, nn.Parameter):
                norm = nn.RMSNorm(child.weight.shape[0], eps=cast(float, child.variance_epsilon))
                norm.weight = child.weight
                setattr(parent, name, norm)


def _transformers() -> Any:
    try:
        import gguf  # noqa: F401
        import transformers
    except ModuleNotFoundError as error:
        raise MissingPackage(
            what="codetta demo",
            package=error.name,
            given="not installed",
            fix="pip install 'codetta[demo]'",
        ) from error
    return transformers


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Keeps progress bars and advice of transformers off the screen; errors still raise."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
