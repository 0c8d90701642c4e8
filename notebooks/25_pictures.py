# %% [markdown]
# # 25 Pictures: how an image gets into a prompt
#
# *Before: [08](08_execution.ipynb), [10](10_scheduler_lab.ipynb) · about 45 minutes with the exercise*
#
# **Question.** A language model reads vectors, one for each token. A picture has no tokens. How does it get into the prompt, which step pays for it, and what does the second question about the same picture cost?
#
# | part | here | vLLM |
# |---|---|---|
# | how large a picture becomes | [`LlavaProcessingInfo`](../stage03_engine/multimodal/llava.py), [`Qwen2VLProcessingInfo`](../stage03_engine/multimodal/qwen2_vl.py) | `model_executor/models/llava.py` LlavaProcessingInfo |
# | the picture on its way to the engine | [`Picture`](../stage03_engine/params/multimodal.py) | `multimodal/inputs.py` MultiModalFeatureSpec |
# | one token becomes many | [`ImagePlaces`](../stage03_engine/frontend/features/image_inputs.py) | `multimodal/processing` PromptReplacement |
# | the vision tower | [`CLIPVisionTransformer`](../stage03_engine/core/features/multimodal/clip.py) | `model_executor/models/clip.py` |
# | which step encodes | [`EncoderSchedulerHook`](../stage03_engine/core/features/multimodal/scheduler_hook.py) | `v1/core/sched/scheduler.py` _try_schedule_encoder_inputs |
# | what has been encoded | [`EncoderCacheManager`](../stage03_engine/core/features/multimodal/encoder_cache.py) | `v1/core/encoder_cache_manager.py` |
# | rows and columns | [`MRopeForCausalLM`](../stage03_engine/core/features/multimodal/mrope.py) | `model_executor/layers/rotary_embedding/mrope.py` |

# %%
import io
import itertools
import json

import lab
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.dummy_weights.dummy_weights import dummy_tensors
from stage03_engine.core.features.multimodal.mrope import grid_positions, with_components
from stage03_engine.core.features.multimodal.pixels import normalised
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.llm import LLM
from stage03_engine.multimodal.picture import picture_of
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY
from stage03_engine.params.multimodal import MultiModalFeature, Picture
from stage03_engine.sampling_params import SamplingParams
from stagetrace import read_run
from stagetrace.figures.style import KINDS, PALE, request_look

torch.set_num_threads(1)
BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # behind what is written on a colour

# %% [markdown]
# ## A model that sees, without a download
#
# What a LLaVA is, its files say: a Llama, a vision tower, and how pictures are prepared. We write these files for a very small one, and fill it with random numbers, larger ones than `load_format="dummy"` would, so that a picture
# makes a difference. Its answers mean nothing, but every picture takes the way that it takes in a real one. Its tokenizer has a token for each byte, and `<image>`.


# %%
SIDE, PATCH = 48, 12
SMALL = {"device": "cpu", "dtype": "float32", "num_threads": 1, "block_size": 8, "kv_cache_memory_bytes": 2_000_000}


def a_folder(config, preparation, *special):
    """A model's files. The ids of the special tokens follow those of the 256 bytes."""
    folder = lab.new_folder()
    ids = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
    shaped = EngineArgs.from_kwargs(model=str(folder), load_format="dummy", **SMALL)
    tensors = dict(dummy_tensors(shaped, torch.float32))
    wide = {name: 10 * tensor if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(wide, folder / "model.safetensors")
    return folder


TEXT = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 256}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_id": 257}
LLAVA |= {"text_config": TEXT | {"model_type": "llama"}}
LLAVA |= {"vision_config": TOWER | {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH}}
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}

llava = a_folder(LLAVA, CROPPED, "</s>", "<image>")
config = EngineArgs.from_kwargs(model=str(llava), **SMALL)
info = MULTIMODAL_REGISTRY.info(config.shape)

# %% [markdown]
# ## A file becomes pixels, and pixels become squares
#
# A PNG of any size is decoded, resized until its shorter side fits, and cropped to the middle. What is left travels to the engine, a byte for each colour of each pixel; the encoder makes numbers of them.


# %%
def a_scene(sun, size=(120, 80)):
    """A sky, a hill, and the sun at some place."""
    image = Image.new("RGB", size, (120, 180, 240))
    draw = ImageDraw.Draw(image)
    draw.ellipse((-20, size[1] * 0.6, size[0] + 20, size[1] * 2), fill=(60, 140, 60))
    draw.ellipse((sun - 11, 10, sun + 11, 32), fill=(255, 210, 0))
    return image


file = io.BytesIO()
a_scene(80).save(file, "PNG")
opened = Image.open(file)
picture = picture_of(opened, info)
seen = Image.frombytes("RGB", (picture.width, picture.height), picture.data)

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3), width_ratios=(3, 2, 2))
for axes, shown, title in (
    (left, opened, "the file"), (middle, seen, "resized and cropped"), (right, seen, "cut into squares"),
):  # fmt: skip
    axes.imshow(shown, interpolation="nearest", extent=(0, shown.width, shown.height, 0))
    axes.set_title(f"{title}: {shown.width} x {shown.height}", fontsize=9)
    axes.set(xticks=[], yticks=[])
for place in range(info.most_tokens):
    row, column = divmod(place, SIDE // PATCH)
    right.text((column + 0.5) * PATCH, (row + 0.5) * PATCH, place, ha="center", va="center", fontsize=8, bbox=BOX)
right.set(xticks=range(0, SIDE, PATCH), yticks=range(0, SIDE, PATCH), xticklabels=[], yticklabels=[])
right.grid(color="white", linewidth=2)
lab.picture(
    figure, "From the file to the squares that the tower sees. What the crop cuts off, the model never learns of."
)
lab.say(
    f"The file has {len(file.getvalue()):,} bytes, and the engine gets {len(picture.data):,}: "
    f"{picture.width} x {picture.height} x 3. As float32 they would be {4 * len(picture.data):,}. "
    f"There are {info.most_tokens} squares of {PATCH} x {PATCH} pixels."
)

# %% [markdown]
# ## Squares become vectors
#
# Each square is multiplied by one matrix and becomes a vector. Then come the tower's layers, and last two matrices that bring the vectors to the width of the language model (the *projector*).

# %% [markdown] tags=["predict"]
# > **Predict.** We paint square 5 black and leave the other 15 as they are. How many of the 16 vectors change: before the tower's layers, and after them?

# %% tags=["predict"]
lab.predict(vectors_changed_before=None, vectors_changed_after=None)

# %%
runner = ModelRunner(config, torch.device("cpu"))
runner.load_model()
model = runner.model


def feature(picture):
    return MultiModalFeature(picture.identifier, 0, info.most_tokens, picture.data, picture.width, picture.height)


def before_and_after(picture):
    """[16, width of the tower], [16, width of the language model]."""
    with torch.inference_mode():
        pixels = normalised(
            feature(picture), model.vision.processor.values, model.multi_modal_projector.linear_1.weight
        )
        before = model.vision_tower.embeddings(pixels[None])[0, 1:]  # the first one stands for the class
        return before.numpy(), model.encode(feature(picture)).numpy()


painted = seen.copy()
painted.paste((0, 0, 0), (PATCH, PATCH, 2 * PATCH, 2 * PATCH))
other = Picture.of(painted.tobytes(), painted.size, painted.size)
moved = [
    np.abs(one - two).max(axis=1) / np.abs(one).max()
    for one, two in zip(before_and_after(picture), before_and_after(other))
]
changed = [int((far > 0).sum()) for far in moved]
figure, panels = plt.subplots(1, 2, figsize=(7, 3.1))
for axes, far, title in zip(panels, moved, ("before the layers", "after the tower and the projector")):
    axes.imshow(np.log10(far.reshape(4, 4) + 1e-9), cmap="cividis", vmin=-9, vmax=0)
    axes.set(title=title, xticks=[], yticks=[])
    for place, value in enumerate(far):
        row, column = divmod(place, 4)
        text, ink = f"{value:.2f}" if value else "same", "black" if value > 1e-4 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)
lab.picture(
    figure, "How far each square's vector moved when square 5 was painted black, as a part of the largest number."
)
lab.say(
    f"the picture has become {model.encode(feature(picture)).shape[0]} vectors, each as wide as a token's embedding"
)
lab.claim("before the layers only the painted square's vector differs", changed[0] == 1 and moved[0][5] > 0)
lab.claim("after them all do: each square looks at all others, with no mask", changed[1] == 16)
lab.compare(vectors_changed_before=changed[0], vectors_changed_after=changed[1])

# %% [markdown]
# So a picture is encoded whole, or not at all: the first vector depends on the last square. A prompt can be computed in chunks, a picture cannot. This is why the scheduler has to plan for it.
#
# ## One placeholder becomes many places
#
# The text says `<image>` once. Before the request leaves the front end, that token becomes as many as the picture has vectors. From then on everybody counts them as tokens: the context, the token budget, the blocks.

# %%
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def ask(llm, text, *pictures):
    return llm.generate({"prompt": text, "multi_modal_data": {"image": list(pictures)}}, GREEDY)[0]


def runs(token_ids, image_token):
    """Pieces of a prompt: the places of each picture, and the text between them."""
    for is_picture, ids in itertools.groupby(token_ids, key=lambda token: token == image_token):
        ids = list(ids)
        yield f"{len(ids)} places of a picture" if is_picture else f"{len(ids)} tokens of text"


noon, evening = a_scene(60), a_scene(95)
folder = lab.new_folder()
questions = {
    "first": ("Look at:<image> What is it?", noon),
    "other picture": ("Look at:<image> What is it?", evening),
    "other question": ("Look at:<image> How warm is it?", noon),
    "other beginning": ("And here<image> What is it?", noon),
}
with LLM(str(llava), trace=str(folder), **SMALL) as llm:
    answers = {name: ask(llm, *question) for name, question in questions.items()}
first = answers["first"]
print(" + ".join(runs(first.prompt_token_ids, config.shape.image_token)))
lab.claim("one placeholder has become a place for each vector", first.prompt_token_ids.count(257) == info.most_tokens)
lab.claim(
    "another picture has another answer to the same question",
    first.outputs[0].token_ids != answers["other picture"].outputs[0].token_ids,
)

# %% [markdown]
# The layers never see the token `<image>`. In the step that computes those places, their rows of the embeddings are the picture's vectors.
#
# ## Who pays for the picture
#
# Four questions were asked, one after the other. Two of them are about the same picture after the same eight characters, one is about another picture, one begins differently. (A block has 8 tokens here.)

# %% [markdown] tags=["predict"]
# > **Predict.** For how many of the four did the tower run? And how many tokens of "other picture" were found in the cache of blocks: 0, 8 or 24?

# %% tags=["predict"]
lab.predict(tower_ran=None, found_for_other_picture=None)

# %%
run = read_run(folder)
order = [event.req for event in run.named("sched.queued")]


def happened(events, req):
    """What an encoder event says of a request."""
    return [name.removeprefix("encoder.") for name in events if any(event.req == req for event in run.named(name))]


rows, told = [], {}
for name, req in zip(questions, order):
    found = sum(event.args["num_tokens"] for event in run.named("sched.prefix_hit") if event.req == req)
    told[name] = found, happened(("encoder.scheduled", "encoder.encoded", "encoder.cache_hit"), req)
    rows.append((name, found, " ".join(told[name][1]) or "(nothing)"))
lab.table(rows, "question", "tokens found in blocks", "encoder events")
encoded = list(run.named("encoder.encoded"))
scheduled = {event.req: event.step for event in run.named("encoder.scheduled")}
begun = {event.req: event.step for event in run.named("sched.admit")}
lab.claim("who is encoded is encoded in the step that admits it", all(begun[r] == s for r, s in scheduled.items()))
lab.claim("the other question finds the picture's blocks, and asks for no vector", told["other question"] == (24, []))
lab.claim("another picture finds the text before it, and nothing more", told["other picture"][0] == 8)
lab.claim(
    "behind another beginning no block fits, but the vectors do",
    told["other beginning"] == (0, ["cache_hit"]),
)
lab.compare(tower_ran=len(encoded), found_for_other_picture=told["other picture"][0])

# %% [markdown]
# There are two caches, and they save two things. *Blocks* hold keys and values: they depend on all that stands before, so they fit behind the same beginning only. The *encoder cache* holds vectors: they depend on the pixels alone,
# and serve anywhere. Whoever finds the blocks needs no vectors.
#
# ## A picture's name
#
# All places of all pictures hold the same token. A hash of tokens would find the wrong picture's blocks, and the answer would be about something else. So the scheduler's copy of a prompt holds other numbers there, made of the
# picture's name: a sha256 of its size and pixels.

# %%
pictures = {name: picture_of(image, info) for name, (_, image) in questions.items()}
lab.table(
    [(name, each.identifier[:16]) for name, each in pictures.items()], "question", "its picture's name begins with"
)
hashes = {name: event.args["block_hashes"] for name, event in zip(questions, run.named("sched.queued"))}
shorter = {name: [found[:6] for found in those] for name, those in hashes.items()}
lab.table(
    [(name, *those[:4]) for name, those in shorter.items()], "question", "block 0", "block 1", "block 2", "block 3"
)
lab.claim(
    "the same bytes have the same name, whoever sends them",
    pictures["first"].identifier == picture_of(a_scene(60), info).identifier,
)
same = {name: [a == b for a, b in zip(hashes["first"], those)][:3] for name, those in hashes.items()}
lab.claim("block 0 is text, and shared by all with the same beginning", same["other picture"] == [True, False, False])
lab.claim("the picture's two blocks come after it, and are shared by its next question", all(same["other question"]))
lab.claim("a hash includes all that stands before", not any(same["other beginning"]))

# %% [markdown]
# With several API keys a salt goes into both, the hashes and the names in the encoder cache: nobody can find out what another has shown by asking how fast an answer comes.
#
# ## The encoder's budget
#
# The encoder cache holds so many vectors, and no step encodes more than it can keep. What a running request still needs is pinned. If there is no room for its next picture, the request gets the tokens in front of it; the picture waits for the next
# step, when the one before has been computed and may go. Here is a prompt with two pictures: with room for both, with room for one, and with room for both but few tokens in a step.


# %%
def steps_of(room, **more):
    """(each step of the prompt as (step, first place, end), [(step, what the encoder did, which picture)], the answer)."""
    folder = lab.new_folder()
    with LLM(str(llava), trace=str(folder), max_num_encoder_input_tokens=room, **SMALL, **more) as llm:
        answer = ask(llm, "One is <image>, two is <image>. Which is warmer?", noon, evening)
    run = read_run(folder)
    chunks = [
        (event.step, event.args["num_computed"], event.args["num_computed"] + event.args["num_tokens"])
        for event in run.named("sched.scheduled")
        if event.args["num_computed"] < len(answer.prompt_token_ids)
    ]
    events = [
        (event.step, name.removeprefix("encoder."), event.args.get("image"))
        for name in ("encoder.evicted", "encoder.scheduled", "encoder.no_room")
        for event in run.named(name)
    ]
    return chunks, sorted(events, key=lambda event: event[0]), answer


budgets = {
    "room for two": steps_of(32),
    "room for one": steps_of(16),
    "10 tokens a step": steps_of(32, max_num_batched_tokens=10, max_num_seqs=2),
}
both, one, little = budgets.values()
tokens = both[2].prompt_token_ids
starts = [place for place, token in enumerate(tokens) if token == 257 and tokens[place - 1] != 257]
figure, axes = plt.subplots(figsize=(10, 2.6))
for row, (chunks, _, _) in enumerate(budgets.values()):
    for step, first_place, end in chunks:
        look = request_look(step - 1)
        axes.barh(row, end - first_place, left=first_place, color=look.face, edgecolor="white", hatch=look.hatch)
        axes.text((first_place + end) / 2, row, f"step {step}", ha="center", va="center", fontsize=8, bbox=BOX)
for start in starts:
    axes.axvspan(start, start + info.most_tokens, color=KINDS["wait"].face, zorder=0)
    axes.text(start + info.most_tokens / 2, -0.62, "picture", ha="center", fontsize=8)
axes.set(xlabel="place in the prompt", ylabel="settings", ylim=(2.5, -0.9), xlim=(0, len(tokens)))
axes.set_yticks(range(len(budgets)), list(budgets))
lab.picture(figure, "Which step computes which places of the prompt. Grey: the places of the two pictures.")
for name, (_, events, _) in budgets.items():
    lab.table([(*event[:2], "-" if event[2] is None else event[2]) for event in events], "step", name, "picture")
lab.claim("with room for both, one step computes the whole prompt", len(both[0]) == 1)
lab.claim("with room for one, the first step ends where the second picture begins", one[0][0][2] == starts[1])
lab.claim("the first picture made room for the second", (2, "evicted", None) in one[1])
touched = [next(step for step, _, end in little[0] if end > start) for start in starts]
lab.claim(
    "with few tokens a step, each picture is encoded once, in the step that computes its first place",
    little[1] == [(step, "scheduled", picture) for picture, step in enumerate(touched)],
)
lab.claim(
    "the answer is always the same", len({tuple(answer.outputs[0].token_ids) for *_, answer in budgets.values()}) == 1
)

# %% [markdown]
# ## A picture that keeps its shape
#
# LLaVA cuts every picture to the same square. A Qwen2-VL keeps its proportions, and within two bounds its size: it only rounds the sides to whole units (28 pixels in the published models, 8 in ours). So how many places a picture takes is known only when the picture is.

# %%
PAD, UNIT = "<|vision_start|><|image_pad|><|vision_end|>", 8
QWEN = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "image_token_id": 258}
QWEN |= {"text_config": TEXT | {"model_type": "qwen2_vl_text", "rope_parameters": {"mrope_section": [2, 3, 3]}}}
EYES = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": UNIT // 2}
QWEN |= {"vision_config": EYES | {"model_type": "qwen2_vl_vision"}}
KEPT = {"min_pixels": 4 * UNIT**2, "max_pixels": 40 * UNIT**2, "patch_size": UNIT // 2, "merge_size": 2}
qwen = a_folder(QWEN, KEPT, "<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
shape = EngineArgs.from_kwargs(model=str(qwen), **SMALL).shape
kept = MULTIMODAL_REGISTRY.info(shape)


def size_row(size):
    wide, high = kept.resized_size(*size)
    return (f"{size[0]} x {size[1]}", f"{wide} x {high}", high // UNIT, wide // UNIT, kept.num_tokens(wide, high))


SIZES = [(40, 24), (24, 40), (41, 23), (8, 8), (1200, 800), (300, 20)]
lab.table(map(size_row, SIZES), "the file", "resized to", "rows", "columns", "places")
lab.claim("a picture takes its rows times its columns", all(row[2] * row[3] == row[4] for row in map(size_row, SIZES)))
lab.claim("an enormous one takes no more than the bound", size_row((1200, 800))[4] <= 40)

# %% [markdown]
# ## Positions with a time, a row and a column
#
# To a LLaVA, square 4 stands behind square 3, although it begins the next row. Qwen2-VL tells its layers where a square is: a position has three *components*, and some of the pairs of a head turn with each (M-RoPE). In a text all three are
# the same number.

# %% [markdown] tags=["predict"]
# > **Predict.** A prompt begins with 6 tokens of text, numbers 0 to 5. Then comes a picture of 3 rows and 5 columns, which takes 15 places. What is the number of the first token behind it?

# %% tags=["predict"]
lab.predict(number_behind_the_picture=None)

# %%
folder = lab.new_folder()
with LLM(str(qwen), trace=str(folder), **SMALL) as llm:
    answer = ask(llm, f"Look:{PAD} What is it?", a_scene(25, (40, 24)))
ids = answer.prompt_token_ids
offset, length = ids.index(258), ids.count(258)
places = grid_positions([MultiModalFeature("", offset, length, b"", 40, 24)], UNIT)
components = with_components(places.between(0, len(ids)))  # [places, 3]

figure, (upper, lower) = plt.subplots(2, 1, figsize=(11, 4.6), height_ratios=(1, 1.7), sharex=True)
upper.imshow(components.T, cmap="cividis", aspect="auto")
middle_value = components.max() / 2
for place, row in itertools.product(range(len(ids)), range(3)):
    value = components[place, row]
    upper.text(
        place, row, value, ha="center", va="center", fontsize=7, color="black" if value > middle_value else "white"
    )
upper.set_yticks(range(3), ["time", "row", "column"])
upper.set_title("The three components of each place", fontsize=9)
for name, values, look, mark in zip(("time", "row", "column"), components.T, map(request_look, (0, 1, 2)), "os^"):
    lower.plot(values, color=look.face, marker=mark, markersize=4, linewidth=1, label=name)
lower.plot(range(len(ids)), color=PALE, linestyle=":", label="the place itself")
for axes in (upper, lower):
    for edge in (offset - 0.5, offset + length - 0.5):
        axes.axvline(edge, color=KINDS["preempted"].face)
lower.set(xlabel="place in the prompt (the picture's are between the two lines)", ylabel="number")
lower.legend(fontsize=8)
lab.picture(
    figure,
    "Within the picture the time stands still, the row climbs slowly and the column runs. Behind it the text goes on after the longer side.",
)

(event,) = read_run(folder).named("mrope.positions")
behind = int(components[offset + length, 0])
lab.say(
    f"The picture begins at number {offset} and takes {length} places; the text behind it goes on at {behind}, not at {offset + length}."
)
lab.claim("the engine shifts all later places by as much", event.args["delta"] == behind - (offset + length))
lab.claim("the text goes on after the longer side", behind == offset + 5)
lab.claim("in a text all three are the same", bool((components[:offset] == components[:offset, :1]).all()))
lab.compare(number_behind_the_picture=behind)

# %% [markdown]
# Two numbers, then, for each token: its *place*, by which blocks, slots and masks go, and its *position*, which only the rotation sees. In decode steps the three components are equal again, so one number and a shift are enough.

# %% [markdown] tags=["exercise"]
# ## Exercise: positions of a prompt with pictures
#
# **Contract.** `positions(parts)`: the parts of a prompt, in order. A number n is a text of n tokens; a pair (rows, columns) is a picture. Return the positions of all places, a list of tuples (time, row, column), and the number at which the next token would go on.
#
# - The first number is 0. A text's tokens count up, all three components alike.
# - A picture's places go row by row. If it begins at number n, the place in row r and column c (from 0) has (n, n + r, n + c).
# - What comes behind a picture goes on at n plus its longer side.
# - There may be several pictures, side by side too, and none.


# %% tags=["exercise"]
def positions(parts: list) -> tuple:
    """(a tuple of three for each place, the next number)."""
    raise NotImplementedError


# %% tags=["check"]
def real_positions(parts):
    """As the engine computes them."""
    pictures, at = [], 0
    for part in parts:
        if isinstance(part, int):
            at += part
        else:
            rows, columns = part
            pictures.append(MultiModalFeature("", at, rows * columns, b"", columns, rows))
            at += rows * columns
    found = grid_positions(pictures, 1)
    return with_components(found.between(0, at)), at + found.delta


def judged(function):
    def call(parts):
        found, following = function(parts)
        return [tuple(map(int, one)) for one in found], int(following)

    return call


cases = [(list(parts),) for count in range(4) for parts in itertools.product((2, (1, 1), (2, 3), (3, 2)), repeat=count)]
passed = lab.check(judged(positions), judged(real_positions), cases)

# %% [markdown]
# Where to go on: [the chapter of models that see](../stage03_engine/multimodal/README.md) names each file in reading order, and a third architecture takes two more of them. [Images in chats](../stage02_server/features/images/README.md) is about the part
# before this notebook: whose files a server decodes, in which process, and what it does with one that lies about its size.
