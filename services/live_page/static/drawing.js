// Bars of requests on a canvas, and charts as SVG. Ends differ by shape: a diamond is predicted, a line is real.

import { svg } from "./dom.js";
import { predictedEnd } from "./state.js";


export function colors() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), line: of("--line"), dim: of("--dim"), mark: of("--mark"), late: of("--late"), ended: of("--ended"), page: of("--page") };
}

// A canvas in device pixels, cleared; undefined while it is not laid out.
export function cleared(canvas, height) {
  const width = canvas.clientWidth;
  if (!width) return undefined;
  const scale = Math.min(2, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

// Give each request a slot that it keeps, as long as its bar is visible.
export function slotsOf(requests, before) {
  const slots = new Map(), used = new Set();
  for (const one of requests) {
    const slot = before.get(one.id);
    if (slot !== undefined && !used.has(slot)) {
      slots.set(one.id, slot);
      used.add(slot);
    }
  }
  let next = 0;
  for (const one of requests) {
    if (slots.has(one.id)) continue;
    while (used.has(next)) next += 1;
    slots.set(one.id, next);
    used.add(next);
  }
  return slots;
}

// Draw the requests of one instance; return the rectangles of their bars, to find the one that is clicked.
export function drawLane(canvas, state, requests, slots, { from, to, now, palette, height }) {
  const cleaned = cleared(canvas, height);
  if (!cleaned) return [];
  const { context, width } = cleaned;
  const x = (time) => ((time - from) / (to - from)) * width;
  const num = Math.min(Math.floor(height / 2), Math.max(6, ...[...slots.values()].map((slot) => slot + 1)));
  const step = height / num, thick = Math.max(1.5, Math.min(7, step - 1));
  const hits = [];
  for (const one of requests) {
    const y = ((slots.get(one.id) % num) + 0.5) * step;
    const start = x(Math.max(from, one.decided)), end = state.endOf(one, now), predicted = predictedEnd(one);
    const isOpen = state.isOpen(one, now), isLate = isOpen && predicted !== undefined && now > predicted;
    context.fillStyle = isOpen ? palette.mark : palette.ended;
    if (one.end === "failed" || one.end === "cancelled") context.fillStyle = palette.late;
    context.fillRect(start, y - thick / 2, Math.max(1, x(isLate ? predicted : end) - start), thick);
    if (isLate) { // from the predicted end on: a thin line
      context.fillStyle = palette.late;
      context.fillRect(x(predicted), y - 0.75, Math.max(1, x(now) - x(predicted)), 1.5);
    }
    if (predicted !== undefined) {
      if (isOpen && predicted > now) { // still to come: an outline
        context.strokeStyle = palette.mark;
        context.lineWidth = 1;
        context.strokeRect(x(now), y - thick / 2 + 0.5, Math.max(0, x(predicted) - x(now)), Math.max(0.5, thick - 1));
      }
      diamond(context, x(predicted), y, Math.max(2, thick / 2 + 1), palette);
    }
    if (!isOpen && one.end !== undefined) {
      context.fillStyle = palette.text;
      context.fillRect(x(end) - 0.75, y - thick / 2 - 1, 1.5, thick + 2);
    }
    hits.push({ id: one.id, left: start - 3, right: x(Math.max(end, predicted ?? end)) + 3, top: y - step / 2, bottom: y + step / 2 });
  }
  context.fillStyle = palette.dim;
  context.fillRect(x(now) - 0.5, 0, 1, height);
  return hits;
}

function diamond(context, x, y, size, palette) {
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.closePath();
  context.fillStyle = palette.page;
  context.fill();
  context.strokeStyle = palette.text;
  context.lineWidth = 1;
  context.stroke();
}

// Charts.

const W = 460, H = 260, L = 56, R = 12, T = 12, B = 34;
const SHAPES = ["circle", "square", "diamond", "triangle", "plus"];
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3"];
const HUES = ["#0b7fb0", "#d1495b", "#c98500", "#3a8d4a", "#8f6fc0"];

function ticksOf(low, high, log) {
  const found = [];
  if (log) {
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
      for (const m of [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
    }
    return found.length > 9 ? found.filter((value) => Number.isInteger(Math.round(1e6 * Math.log10(value)) / 1e6)) : found;
  }
  const raw = (high - low) / 5 || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * size).find((one) => one >= raw);
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) found.push(Number(value.toPrecision(6)));
  return found;
}

// Whole numbers, where a chart shows counts.
export const whole = (value) => (Number.isInteger(value) ? String(value) : "");

function frame(label, xAxis, yAxis, x, y) {
  const parts = [svg("rect", { x: L, y: T, width: W - L - R, height: H - T - B, class: "grid" })];
  for (const value of yAxis.ticks) {
    parts.push(svg("line", { x1: L, x2: W - R, y1: y(value), y2: y(value), class: "grid" }));
    parts.push(svg("text", { x: L - 5, y: y(value) + 4, "text-anchor": "end" }, yAxis.text(value)));
  }
  for (const value of xAxis.ticks) parts.push(svg("text", { x: x(value), y: H - B + 14, "text-anchor": "middle" }, xAxis.text(value)));
  parts.push(svg("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, label));
  return parts;
}

function shape(kind, x, y, color) {
  const size = 3;
  if (kind === "circle") return svg("circle", { cx: x, cy: y, r: size, fill: color, "fill-opacity": 0.7 });
  const corners = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]], diamond: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
    triangle: [[0, -1.3], [1.2, 0.9], [-1.2, 0.9]],
    plus: [[-0.4, -1.3], [0.4, -1.3], [0.4, -0.4], [1.3, -0.4], [1.3, 0.4], [0.4, 0.4], [0.4, 1.3], [-0.4, 1.3], [-0.4, 0.4], [-1.3, 0.4], [-1.3, -0.4], [-0.4, -0.4]],
  }[kind];
  return svg("polygon", { points: corners.map(([a, b]) => `${x + size * a},${y + size * b}`).join(" "), fill: color, "fill-opacity": 0.7 });
}

export function seriesMark(number) {
  return svg("svg", { viewBox: "0 0 30 10", width: 30, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 30, y1: 5, y2: 5, stroke: HUES[number % 5], "stroke-width": 2, "stroke-dasharray": DASHES[number % 5] || "none" }),
    shape(SHAPES[number % 5], 15, 5, HUES[number % 5]));
}

// Points [x, y] of series on equal logarithmic axes, beside the diagonal.
export function scatter(label, series) {
  const values = series.flat(2).filter((value) => value > 0);
  if (!values.length) return undefined;
  const low = Math.min(...values) * 0.9, high = Math.max(...values) * 1.1, span = Math.log(high / low);
  const x = (value) => L + (Math.log(value / low) / span) * (W - L - R), y = (value) => H - B - (Math.log(value / low) / span) * (H - T - B);
  const axis = { ticks: ticksOf(low, high, true), text: (value) => String(Number(value.toPrecision(2))) };
  return svg("svg", { viewBox: `0 0 ${W} ${H}`, width: W, role: "img", "aria-label": label }, frame(label, axis, axis, x, y),
    svg("line", { x1: L, y1: H - B, x2: W - R, y2: T, class: "equal" }),
    series.flatMap((points, number) => points.filter(([a, b]) => a > 0 && b > 0).map(([a, b]) => shape(SHAPES[number % 5], x(a), y(b), HUES[number % 5]))));
}

// Lines of points [x, y]; `isStep` keeps a value until the next one.
export function lines(label, series, { xText, yText, isStep = false, low = 0 }) {
  const points = series.flat();
  if (points.length < 2) return undefined;
  const xs = points.map((point) => point[0]), ys = points.map((point) => point[1]);
  const left = Math.min(...xs), right = Math.max(...xs) || 1, bottom = Math.min(low, ...ys), top = Math.max(...ys) * 1.05 || 1;
  const x = (value) => L + ((value - left) / (right - left || 1)) * (W - L - R), y = (value) => H - B - ((value - bottom) / (top - bottom || 1)) * (H - T - B);
  const path = (line) => line.map(([a, b], at) => (at === 0 ? `M${x(a)},${y(b)}` : isStep ? `H${x(a)}V${y(b)}` : `L${x(a)},${y(b)}`)).join("");
  return svg("svg", { viewBox: `0 0 ${W} ${H}`, width: W, role: "img", "aria-label": label },
    frame(label, { ticks: ticksOf(left, right, false).slice(0, 6), text: xText }, { ticks: ticksOf(bottom, top, false), text: yText }, x, y),
    series.map((line, number) => line.length && svg("path", { d: path(line), fill: "none", stroke: HUES[number % 5], "stroke-width": 1.8, "stroke-dasharray": DASHES[number % 5] || "none" })));
}
