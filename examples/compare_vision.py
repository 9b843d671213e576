"""The same picture and question through the published reference and through Kestrel, one model in memory at a time.

    compare_vision.py --mode reference --reference-path ~/code/moondream --weights W --image I --output a.safetensors
    compare_vision.py --mode kestrel --weights W --image I --output b.safetensors
    compare_vision.py --compare a.safetensors b.safetensors

The reference is a checkout of github.com/vikhyat/moondream (Moondream 2). It resizes with libvips where pyvips is
installed and normalises pixels in bfloat16; with `--pixels kestrel` it gets Kestrel's crops and only the models differ.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from kestrel.cache import CacheManager
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, KestrelError
from kestrel.families import ready_model
from kestrel.images.crops import make_crops
from kestrel.images.decode import ImageLimits, decode_image
from kestrel.images.picture import TilingParams, plan_tiling
from kestrel.models.checkpoint_files import find_weights
from kestrel.models.locate import TOKENIZER_NAME, read_config
from kestrel.request import GenerationRequest
from kestrel.runtime.bring_up import ModelRuntime
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.scheduler import GenerationScheduler
from kestrel.skills.query import QuerySkill
from kestrel.tokens import ImageSpan

AS_STORED = ImageLimits(max_pixels=100_000_000, max_bytes=64 * 2**20, honour_exif=False)


def run_kestrel(args: argparse.Namespace, config: RuntimeConfig) -> tuple[torch.Tensor, str]:
    """(image embeddings, answer) from the runtime and scheduler that serve requests."""
    ready = ready_model(config)
    runtime, skill = ready.runtime, QuerySkill()
    assert isinstance(runtime, ModelRuntime)
    image, vision = decode_image(args.image, AS_STORED), runtime.decoder.vision
    with torch.inference_mode():
        embeddings_PD = vision.embed_images([vision.prepare_image(image)])[0]  # pyright: ignore[reportOptionalMemberAccess]
    request = skill.parse({"image": image, "question": args.prompt, "reasoning": False, **args.settings}, ready.profile)
    prompt = skill.prompt(request, [ImageSpan(image.digest, ready.num_image_positions)], ready.profile)
    consumer, images = skill.start(request, ready.profile), {image.digest: image}
    scheduler = GenerationScheduler(runtime, CacheManager(runtime.limits.num_pages, runtime.limits.page_size))
    scheduler.add(GenerationRequest("compare", prompt.items, prompt.grammar, prompt.sampling, consumer, images))
    while True:
        for update in scheduler.step():
            if update.error is not None:
                raise update.error
            if update.output is not None:
                return embeddings_PD, update.output.text


def run_reference(args: argparse.Namespace, config: RuntimeConfig) -> tuple[torch.Tensor, str]:
    reference, vision, weights = import_reference(args.reference_path)
    dtype = choose_dtype(config, device := choose_device(config))
    file = find_weights(Path(args.weights).expanduser())
    sizes, tokenizer = read_config(file.parent), file.parent / TOKENIZER_NAME
    if sizes is not None and "moe" in sizes["text"]:
        raise CheckpointError(f"--weights: {file.parent} is a Moondream 3, the reference is Moondream 2")
    if tokenizer.is_file():  # else the reference fetches its own from the hub
        reference.Tokenizer = SimpleNamespace(from_pretrained=lambda name: Tokenizer.from_file(str(tokenizer)))
    reference.prepare_crops = kestrel_crops if args.pixels == "kestrel" else vision.prepare_crops
    model = reference.MoondreamModel(reference.MoondreamConfig.from_dict(sizes or {}), dtype=dtype)
    weights.load_weights_into_model(str(file), model)
    model.to(device=device, dtype=dtype)
    model.vision["patch_emb"].register_forward_pre_hook(lambda layer, given: (given[0].to(layer.weight.dtype),))
    with torch.inference_mode(), Image.open(args.image) as image:
        embeddings_PD = model._run_vision_encoder(image)
        answer = model.query(model.encode_image(image), args.prompt, settings=args.settings)["answer"]
    return embeddings_PD, answer


def import_reference(path: str | None) -> list[Any]:
    """The modules moondream, vision and weights of a checkout's folder moondream/torch."""
    root = Path(path or "").expanduser()
    if path is None or not (root / "moondream" / "torch" / "moondream.py").is_file():
        raise CheckpointError(f"--reference-path: {path} is no checkout; clone github.com/vikhyat/moondream")
    sys.path.insert(0, str(root))
    return [importlib.import_module(f"moondream.torch.{name}") for name in ("moondream", "vision", "weights")]


def kestrel_crops(image: Image.Image, config: Any, device: Any) -> tuple[torch.Tensor, tuple[int, int]]:
    """Crops as the reference lays them out: [N, 3, crop, crop] from -1 to 1, the global one and always local ones."""
    rgb = decode_image(image, AS_STORED)
    params = TilingParams(config.crop_size, config.enc_patch_size, config.overlap_margin, config.max_crops)
    plan = plan_tiling(rgb.height, rgb.width, params)
    crops_NHWC = make_crops(rgb, plan)[[0, *plan.local_crop_indices]]
    return crops_NHWC.permute(0, 3, 1, 2).to(device).float().div(255).sub(0.5).div(0.5), (plan.rows, plan.cols)


def report(mode: str, embeddings_PD: torch.Tensor, answer: str, output: str | None) -> None:
    x = embeddings_PD.float().cpu().contiguous()
    numbers = {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max(), "mean norm": x.norm(dim=1).mean()}
    print(f"{mode}: {answer!r}")
    print(f"vision embeddings {tuple(x.shape)}:", ", ".join(f"{name} {v:.6f}" for name, v in numbers.items()))
    if output is not None:
        save_file({"vision": x}, output, metadata={"mode": mode, "answer": answer})


def compare(*paths: str) -> None:
    files = [safe_open(path, "pt") for path in paths]
    (a, b), (about_a, about_b) = [f.get_tensor("vision") for f in files], [f.metadata() for f in files]
    modes, apart = f"{about_a['mode']} and {about_b['mode']}", (a - b).abs()
    print(f"{modes}: max |difference| {apart.max():.3e}, mean {apart.mean():.3e}")
    print("answers are", "equal" if about_a["answer"] == about_b["answer"] else "different")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("reference", "kestrel"))
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="compare two files written by --output")
    for flag in ("--weights", "--image", "--reference-path", "--output"):
        parser.add_argument(flag)
    for flag, default in (("--prompt", "Describe the image."), ("--device", "auto"), ("--dtype", "auto")):
        parser.add_argument(flag, default=default)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--pixels", choices=("reference", "kestrel"), default="reference")
    args = parser.parse_args(argv)
    if args.compare is None and None in (args.mode, args.weights, args.image):
        parser.error("give --mode, --weights and --image, or --compare with two files")
    try:
        if args.compare is not None:
            compare(*args.compare)
        else:
            config = RuntimeConfig(model_path=args.weights, device=args.device, dtype=args.dtype, max_batch_size=1)
            run = run_reference if args.mode == "reference" else run_kestrel
            args.settings = {"max_tokens": args.max_new_tokens, "temperature": 0}
            report(args.mode, *run(args, config), args.output)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
