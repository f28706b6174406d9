"""Whole models: ``codetta.compile``, ``codetta.nn`` and ``codetta.explain``."""

from __future__ import annotations

from codetta.errors.base import CodettaError


class UnsupportedModel(CodettaError, ValueError):
    template = "codetta.nn.Decoder cannot run this model: {reason}. {fix}"
    wrong = "codetta.nn.Decoder.from_hf(torch.nn.Linear(2, 2))"
    right = ""


class AutocastUnsupported(CodettaError, RuntimeError):
    template = (
        "codetta.nn.Decoder does not run under torch.autocast({device!r}): its kernels keep the "
        "residual stream in the dtype of the weights, autocast would keep it in fp32, and results "
        "would silently differ. Leave autocast out and convert the model instead: load it with "
        "dtype=torch.bfloat16, or model.to(torch.bfloat16)."
    )
    wrong = ""
    right = ""


class UnknownOption(CodettaError, ValueError):
    template = "codetta.compile has no {option}={given!r}. Known are {allowed}."
    wrong = "codetta.compile(torch.nn.Linear(4, 4), backend='fast')"
    right = "codetta.compile(torch.nn.Linear(4, 4), backend='auto')"


class PackNeedsModule(CodettaError, TypeError):
    template = (
        "codetta.compile(..., pack=True) was given {given}: it changes where the parameters of a "
        "module lie, and needs the module. Compile the module or a method of it (model, "
        "model.forward), or leave pack=True out."
    )
    wrong = "codetta.compile(lambda x: x, pack=True)"
    right = "codetta.compile(torch.nn.Linear(4, 4).forward, pack=True)"


class PackSharded(CodettaError, TypeError):
    template = (
        "codetta.compile(..., pack=True) cannot lay out sharded parameters ({what}): whoever "
        "shards them decides where they lie. Nothing was changed. Plain parameters can be packed, "
        "also under DistributedDataParallel. Leave pack=True out; with FSDP2 compile each block "
        "before it is sharded: block.forward = codetta.compile(block.forward)."
    )
    wrong = ""
    right = ""


class LogitsNotKept(CodettaError, AttributeError, RuntimeError):
    template = (
        "the logits are not there ({use} was asked of them): codetta.compile(..., logits='none') "
        "computes the loss without them. Compile with logits='keep', or call the model without "
        "labels, which returns them."
    )
    wrong = "codetta.capture.withheld.Withheld().argmax(-1)"
    right = "assert codetta.capture.withheld.Withheld() is not None"


class ShardedParameters(CodettaError, TypeError):
    template = (
        "{count} tensors of this model are DTensors (the first is placed {placements}); a Plan "
        "runs on plain tensors and would not communicate. With FSDP2, compile each block before "
        "it is sharded: block.forward = codetta.compile(block.forward), then fully_shard(block): "
        "it then sees its gathered weights. For tensor parallelism use torch.compile."
    )
    wrong = ""
    right = ""


class UnknownModel(CodettaError, ValueError):
    template = (
        "there is no model {given!r} to explain: {reason}. Give a model of the Hugging Face Hub "
        "whose config can be loaded, a folder or config.json, or one of {known}."
    )
    wrong = (
        "from codetta.explanation.configs import configuration\n"
        "configuration('./nowhere/config.json')"
    )
    right = ""


class UnknownGpu(CodettaError, ValueError):
    template = "no roofline figures are known for GPU {given!r}. Known are {allowed}."
    wrong = "codetta.explain(torch.nn.Linear(4, 4), a).on('gtx')"
    right = "codetta.explain(torch.nn.Linear(4, 4), a).on('h200')"


class MissingPackage(CodettaError, ImportError):
    template = "{what} needs the package {package}, which is {given}. Install it with {fix}."
    wrong = ""
    right = ""
