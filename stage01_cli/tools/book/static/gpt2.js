// gpt2-tiny in plain JavaScript, for the worker of "Your own text": the tokenizer, and a forward pass over a paged KV cache.
// The twin of stage03_engine/core/models/gpt2.py and of the tokenizers package; the page's Python decides who gets which block.

const PIECES = /'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu; // GPT-2's; \s would be another set of spaces here

/** Byte -> the character that stands for it in the vocabulary: printable ones for themselves, the others from 256 on. */
function byteCharacters() {
  const plain = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(plain(byte) ? byte : next++));
}

/** Byte-pair encoding as tokenizer.json describes it. */
export class Tokenizer {
  constructor({ model, added_tokens }) {
    this.ids = new Map(Object.entries(model.vocab));
    this.texts = new Map([...this.ids].map(([text, id]) => [id, text]));
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join("\n"), rank]));
    this.special = new Map(added_tokens.map(({ content, id }) => [content, id]));
    this.ofByte = byteCharacters();
    this.byteOf = new Map(this.ofByte.map((character, byte) => [character, byte]));
  }

  encode(text) {
    const names = [...this.special.keys()].map((name) => name.replace(/[|\\{}()[\]^$+*?.]/g, "\\$&"));
    const parts = names.length ? text.split(new RegExp(`(${names.join("|")})`)) : [text];
    return parts.flatMap((part) => (this.special.has(part) ? [this.special.get(part)] : this.#plain(part)));
  }

  #plain(text) {
    const ids = [];
    for (const [piece] of text.toWellFormed().matchAll(PIECES)) {
      let parts = Array.from(new TextEncoder().encode(piece), (byte) => this.ofByte[byte]);
      for (;;) {
        let best = Infinity;
        for (let at = 0; at + 1 < parts.length; at++) best = Math.min(best, this.ranks.get(`${parts[at]}\n${parts[at + 1]}`) ?? Infinity);
        if (best === Infinity) break;
        const merged = [];
        for (let at = 0; at < parts.length; at++) {
          const fits = at + 1 < parts.length && this.ranks.get(`${parts[at]}\n${parts[at + 1]}`) === best;
          merged.push(fits ? parts[at] + parts[++at] : parts[at]);
        }
        parts = merged;
      }
      parts.forEach((part) => ids.push(this.ids.get(part)));
    }
    return ids;
  }

  /** Bytes that are no character yet, at an end for instance, become U+FFFD. */
  decode(ids) {
    const bytes = ids.flatMap((id) => Array.from(this.texts.get(id), (character) => this.byteOf.get(character) ?? 0x20));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
  }
}

/** Name -> Float32Array, of a safetensors file of 16-bit floats. */
export function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const wide = Float32Array.from({ length: 65536 }, (_, bits) => widened(bits));
  const found = {};
  for (const [name, { dtype, data_offsets: [start, end] }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    if (dtype !== "F16") throw new Error(`${name} is ${dtype}, and this page reads F16`);
    found[name] = Float32Array.from(new Uint16Array(buffer.slice(8 + length + start, 8 + length + end)), (bits) => wide[bits]);
  }
  return found;
}

function widened(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

function layerNorm(x, weight, bias, epsilon) {
  let mean = 0, variance = 0;
  for (const value of x) mean += value;
  mean /= x.length;
  for (const value of x) variance += (value - mean) ** 2;
  const scale = 1 / Math.sqrt(variance / x.length + epsilon);
  return x.map((value, i) => (value - mean) * scale * weight[i] + bias[i]);
}

/** x W + b, with W [inputs, outputs] row by row; the inputs are a multiple of four. */
function linear(x, weight, bias) {
  const y = Float32Array.from(bias), outputs = y.length;
  for (let i = 0; i < x.length; i += 4) { // four rows at a time, so that y is read and written a quarter as often
    const [a, b, c, d] = x.subarray(i, i + 4), row = i * outputs;
    for (let j = 0, at = row; j < outputs; j++, at++) {
      y[j] += a * weight[at] + b * weight[at + outputs] + c * weight[at + 2 * outputs] + d * weight[at + 3 * outputs];
    }
  }
  return y;
}

const gelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

/** One model with a cache of `blocks` blocks of `blockSize` tokens. */
export class GPT2 {
  constructor(config, tensors, blocks, blockSize) {
    Object.assign(this, { config, tensors, blockSize });
    this.width = config.n_embd;
    this.keys = Array.from({ length: config.n_layer }, () => new Float32Array(blocks * blockSize * this.width));
    this.values = this.keys.map((keys) => new Float32Array(keys.length));
  }

  /** Compute `tokens`, which stand from `start` on; their keys and values go to the blocks of `table`. Returns the logits after the last
   * one, and the attention weights of that one for the head [layer, head] of `watch`, if there is one. */
  forward(tokens, start, table, watch = null) {
    let hidden = null, weights = null;
    tokens.forEach((token, i) => {
      [hidden, weights] = this.#token(token, start + i, table, i === tokens.length - 1 ? watch : null);
    });
    const { tensors, width, config } = this;
    const x = layerNorm(hidden, tensors["ln_f.weight"], tensors["ln_f.bias"], config.layer_norm_epsilon);
    const logits = new Float32Array(config.vocab_size);
    for (let id = 0; id < logits.length; id++) {
      let sum = 0;
      for (let j = 0; j < width; j++) sum += x[j] * tensors["wte.weight"][id * width + j];
      logits[id] = sum;
    }
    return { logits, weights };
  }

  #token(token, position, table, watch) {
    const { tensors, width, config } = this;
    const slot = (at) => (table[Math.floor(at / this.blockSize)] * this.blockSize + (at % this.blockSize)) * width;
    let weights = null;
    let x = tensors["wte.weight"].slice(token * width, (token + 1) * width);
    x = x.map((value, j) => value + tensors["wpe.weight"][position * width + j]);
    const plus = (delta) => (x = x.map((value, j) => value + delta[j]));
    for (let layer = 0; layer < config.n_layer; layer++) {
      const of = (name) => tensors[`h.${layer}.${name}`];
      const norm = (name) => layerNorm(x, of(`${name}.weight`), of(`${name}.bias`), config.layer_norm_epsilon);
      const qkv = linear(norm("ln_1"), of("attn.c_attn.weight"), of("attn.c_attn.bias"));
      const keys = this.keys[layer], values = this.values[layer];
      keys.set(qkv.subarray(width, 2 * width), slot(position));
      values.set(qkv.subarray(2 * width), slot(position));
      const attended = new Float32Array(width), size = width / config.n_head;
      for (let head = 0; head < config.n_head; head++) {
        const first = head * size, scores = new Float32Array(position + 1);
        for (let at = 0; at <= position; at++) {
          const there = slot(at) + first;
          let sum = 0;
          for (let j = 0; j < size; j++) sum += qkv[first + j] * keys[there + j];
          scores[at] = sum / Math.sqrt(size);
        }
        const highest = scores.reduce((a, b) => Math.max(a, b));
        let total = 0;
        for (let at = 0; at <= position; at++) total += scores[at] = Math.exp(scores[at] - highest);
        for (let at = 0; at <= position; at++) {
          const share = (scores[at] /= total), there = slot(at) + first;
          for (let j = 0; j < size; j++) attended[first + j] += share * values[there + j];
        }
        if (watch?.[0] === layer && watch[1] === head) weights = scores;
      }
      plus(linear(attended, of("attn.c_proj.weight"), of("attn.c_proj.bias")));
      plus(linear(linear(norm("ln_2"), of("mlp.c_fc.weight"), of("mlp.c_fc.bias")).map(gelu), of("mlp.c_proj.weight"), of("mlp.c_proj.bias")));
    }
    return [x, weights];
  }
}

// What the worker's Python imports as `gpt2`

let tokenizer = null, config = null, tensors = null, model = null;

/** Called once, before Python imports this module: `bytes(name)` fetches a file of the page. */
export async function prepare(bytes) {
  const [described, sizes, weights] = await Promise.all(["gpt2-tiny-tokenizer.json", "gpt2-tiny-config.json", "gpt2-tiny.safetensors"].map(bytes));
  const parsed = (buffer) => JSON.parse(new TextDecoder().decode(buffer));
  [tokenizer, config, tensors] = [new Tokenizer(parsed(described)), parsed(sizes), readTensors(weights)];
}

/** An empty cache. */
export function begin(blocks, blockSize) {
  model = new GPT2(config, tensors, blocks, blockSize);
}

export const encode = (text) => tokenizer.encode(text);
export const decode = (ids) => tokenizer.decode([...ids]);

/** The likeliest token, the five likeliest with their chances, and the attention of the watched head, as JSON. */
export function forward(tokens, start, table, layer, head) {
  const { logits, weights } = model.forward([...tokens], start, [...table], [layer, head]);
  const highest = logits.reduce((a, b) => Math.max(a, b));
  const total = logits.reduce((sum, value) => sum + Math.exp(value - highest), 0);
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b).slice(0, 5);
  const likely = order.map((id) => [tokenizer.decode([id]), Math.exp(logits[id] - highest) / total]);
  return JSON.stringify({ token: order[0], likely, weights: [...weights] });
}
