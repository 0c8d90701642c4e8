// Part 7 of 9: four curves over the same steps as the pictures above them.

/** What each curve tells: `of` gives a step's values as [value, in words, id of a request or null]. */
const CURVES = {
  rate: {
    title: "tokens/s", unit: "/s",
    explains: "tokens made in a step, by how long it took. A step that only reads prompts makes none.",
    of: ({ made, ms }) => (ms ? [[(1000 * made) / ms, `${made} tokens in ${time(ms)}`, null]] : []),
  },
  first: {
    title: "time to first token", unit: " ms", dots: true,
    explains: "a dot for each request, in the step of its first token: from its arrival in the engine, waiting included.",
    of: ({ firsts }, state) => firsts.map(([id, ms]) => [ms, `${state.label(id)} after ${time(ms)}`, id]),
  },
  each: {
    title: "time per token", unit: " ms",
    explains: "between one token and the next of the same request, the median of those that got one in the step.",
    of: ({ gaps }) => (gaps.length ? [[median(gaps), `${time(median(gaps))}, of ${gaps.length} requests`, null]] : []),
  },
  queue: {
    title: "queue", unit: "", whole: true,
    explains: "requests that wait while the step runs, the preempted ones included.",
    of: ({ waiting }) => [[waiting.length, `${waiting.length} wait`, null]],
  },
};
const CURVE_HEIGHT = 74;

const time = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

/** The top of an axis, a round number. A few values far above all others do not flatten the rest: they are cut off, and marked. */
function axisTop(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const [most, high] = [sorted.at(-1) ?? 0, sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0];
  const top = high > 0 && most > 3 * high ? 1.5 * high : most;
  const power = 10 ** Math.floor(Math.log10(top || 1));
  return [1, 2, 3, 5, 8, 10].map((digit) => digit * power).find((round) => round >= top * 0.999) ?? 1;
}

/** Draw one curve of a state with a pen that has been cleared, and return what it says in words. `at`: the column under the pointer, or null. */
function drawCurve({ pen, width, height }, name, state, look, at) {
  const { of, dots, whole, unit, title, explains } = CURVES[name];
  const columns = state.steps.map((done) => of(done, state));
  const all = columns.flat().map(([value]) => value);
  const top = whole ? Math.max(4, axisTop(all)) : axisTop(all);
  const [low, high, wide] = [height - 14, 12, (width - MARGIN) / STEPS_KEPT];
  const x = (column) => MARGIN + (column + 0.5) * wide;
  const y = (value) => low - (Math.min(value, top) / top) * (low - high);
  pen.strokeStyle = pen.fillStyle = colour("--soft");
  pen.lineWidth = 1;
  pen.strokeRect(MARGIN - 0.5, high - 0.5, 0, low - high + 1); // the axes
  pen.strokeRect(MARGIN - 0.5, low + 0.5, width - MARGIN, 0);
  pen.textAlign = "right";
  pen.fillText(`${top >= 1000 ? `${top / 1000}k` : +top.toPrecision(2)}`, MARGIN - 4, high + 2);
  pen.fillText("0", MARGIN - 4, low - 4);
  pen.textAlign = "left";
  if (columns.length) pen.fillText(`step ${state.steps[0].step}`, MARGIN, height - 6);
  pen.textAlign = "right";
  if (columns.length > 1) pen.fillText(`${state.steps.at(-1).step}`, Math.min(width, Math.max(x(columns.length - 1) + 8, MARGIN + 90)), height - 6);
  pen.textAlign = "left";
  if (at !== null && at < columns.length) pen.fillRect(x(at) - 0.5, high, 1, low - high);
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  let isDrawn = false;
  columns.forEach((values, column) => {
    for (const [value] of dots ? [] : values) pen[isDrawn ? "lineTo" : "moveTo"](x(column), y(value));
    isDrawn = values.length > 0;
  });
  pen.stroke();
  columns.forEach((values, column) => {
    for (const [value, , id] of values) {
      const isCut = value > top * 1.001;
      pen.fillStyle = isCut ? colour("--text") : id === null ? colour("--accent") : look(pen, id);
      if (isCut) pen.fill(new Path2D(`M${x(column) - 4} ${high} h8 l-4 -8 z`));
      else if (dots || values.length + (columns[column - 1]?.length ?? 0) + (columns[column + 1]?.length ?? 0) === 1) pen.fill(circle(x(column), y(value)));
    }
  });
  const cut = all.filter((value) => value > top * 1.001).length;
  const there = at === null ? columns.findLast((values) => values.length) : columns[at];
  const step = at === null || !state.steps[at] ? "the last" : `step ${state.steps[at].step}`;
  return { title, unit, explains, cut, now: `${step}: ${there?.length ? there.map(([, words]) => words).join(", ") : "nothing"}` };
}

function circle(x, y) {
  const path = new Path2D();
  path.arc(x, y, 3, 0, 7);
  return path;
}
