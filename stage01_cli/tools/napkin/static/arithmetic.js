// The napkin's arithmetic: arithmetic.py in the language of the page, function by function and in the same order of operations, so
// that both give the same numbers to the last bit. tests/stage01_cli/test_napkin_page.py compares them. What it means is said there.

const MEMORY_SHARE = 0.9;

function layerWeights(model) {
  const queries = model.num_heads * model.head_dim, keys = model.num_kv_heads * model.head_dim;
  const attention = model.hidden_size * (queries + 2 * keys) + queries * model.hidden_size;
  const mlp = (model.gated ? 3 : 2) * model.hidden_size * model.intermediate_size;
  return model.num_layers * (attention + mlp);
}

function outputWeights(model) {
  return model.vocab_size * model.hidden_size;
}

function lookedUpWeights(model) {
  const rows = model.learned_positions ? model.max_position_embeddings : 0;
  return (rows + (model.tied ? 0 : model.vocab_size)) * model.hidden_size;
}

function weightBytes(model, load) {
  return (layerWeights(model) + outputWeights(model) + lookedUpWeights(model)) * load.weight_bytes;
}

function kvBytesPerToken(model, load) {
  return 2 * model.num_layers * model.num_kv_heads * model.head_dim * load.kv_bytes;
}

function readWeightsSeconds(model, chip, load) {
  return (layerWeights(model) + outputWeights(model)) * load.weight_bytes / (chip.bandwidth * load.reach);
}

function readContextSeconds(model, chip, load) {
  const context = load.prompt + load.answer / 2;
  return context * kvBytesPerToken(model, load) / (chip.bandwidth * load.reach);
}

function computeTokenSeconds(model, chip, load) {
  const context = load.prompt + load.answer / 2;
  const pairs = 4 * model.num_layers * model.num_heads * model.head_dim * context;
  return (2 * (layerWeights(model) + outputWeights(model)) + pairs) / (chip.arithmetic * load.reach);
}

function stepSeconds(model, chip, load, batch) {
  const memory = readWeightsSeconds(model, chip, load) + batch * readContextSeconds(model, chip, load);
  return Math.max(memory, batch * computeTokenSeconds(model, chip, load));
}

function prefillSeconds(model, chip, load) {
  const pairs = 4 * model.num_layers * model.num_heads * model.head_dim * (load.prompt * (load.prompt + 1) / 2);
  const operations = 2 * layerWeights(model) * load.prompt + 2 * outputWeights(model) + pairs;
  return Math.max(readWeightsSeconds(model, chip, load), operations / (chip.arithmetic * load.reach));
}

function tpotSeconds(model, chip, load, batch) {
  return stepSeconds(model, chip, load, batch) + batch * (prefillSeconds(model, chip, load) / load.answer);
}

function crossing(model, chip, load) {
  const gain = computeTokenSeconds(model, chip, load) - readContextSeconds(model, chip, load);
  return gain > 0 ? readWeightsSeconds(model, chip, load) / gain : Infinity;
}

function memoryWall(model, chip, load) {
  const left = chip.memory * MEMORY_SHARE - weightBytes(model, load);
  return Math.max(0, Math.floor(left / ((load.prompt + load.answer) * kvBytesPerToken(model, load))));
}

function bandwidthWall(model, chip, load) {
  const each = readContextSeconds(model, chip, load) + prefillSeconds(model, chip, load) / load.answer;
  return Math.max(0, Math.floor((load.tpot - readWeightsSeconds(model, chip, load)) / each));
}

function arithmeticWall(model, chip, load) {
  const each = computeTokenSeconds(model, chip, load) + prefillSeconds(model, chip, load) / load.answer;
  return Math.max(0, Math.floor(load.tpot / each));
}

function napkin(model, chip, load) {
  if (load.prompt + load.answer > model.max_position_embeddings) {
    throw new RangeError(`the context of ${model.name} ends at ${model.max_position_embeddings.toLocaleString("en-US")} tokens`);
  }
  const walls = {
    memory: memoryWall(model, chip, load), bandwidth: bandwidthWall(model, chip, load), arithmetic: arithmeticWall(model, chip, load),
  };
  const wall = Object.keys(walls).reduce((lowest, name) => walls[name] < walls[lowest] ? name : lowest);
  const users = walls[wall];
  const tpot = tpotSeconds(model, chip, load, users);
  const rate = users / tpot;
  return {
    weight_bytes: weightBytes(model, load), kv_bytes_per_token: kvBytesPerToken(model, load),
    kv_bytes_per_user: (load.prompt + load.answer) * kvBytesPerToken(model, load),
    prefill: prefillSeconds(model, chip, load), step_of_one: stepSeconds(model, chip, load, 1), crossing: crossing(model, chip, load),
    memory_wall: walls.memory, bandwidth_wall: walls.bandwidth, arithmetic_wall: walls.arithmetic, users, wall, tpot,
    tokens_per_second: rate, cost: users ? load.price / 3600 / rate * 1e6 : Infinity,
  };
}
