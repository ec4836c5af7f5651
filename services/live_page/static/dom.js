// Elements whose contents are text nodes only: nothing that a client sent is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// A view whose contents are made again, at most once per interval.
export class RedrawnView {
  constructor(page, everyMs = 1000) {
    this.page = page;
    this.everyMs = everyMs;
  }

  mount(root) {
    this.body = el("div", {});
    root.append(this.body);
    this.drawnAt = undefined;
  }

  draw(state, now) {
    if (this.drawnAt !== undefined && performance.now() - this.drawnAt < this.everyMs) return;
    this.drawnAt = performance.now();
    this.body.replaceChildren(...this.contents(state, now));
  }
}

// Set a text only where it differs: unchanged nodes cost no layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A table; a head that starts with "<" is of a column of texts.
export function table(caption, heads, rows, rowAttributes = () => ({})) {
  const isText = heads.map((head) => head.startsWith("<"));
  const head = el("tr", {}, heads.map((name, at) => el("th", { scope: "col", class: isText[at] && "text" }, name.replace(/^</, ""))));
  const body = rows.map((cells, number) =>
    el("tr", rowAttributes(number), cells.map((cell, at) => el("td", { class: isText[at] && "text" }, cell))));
  return el("div", { class: "scroll" }, el("table", {}, el("caption", { class: "text" }, caption), el("thead", {}, head), el("tbody", {}, body)));
}

// Numbers as people read them; nothing for what is not known.

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function seconds(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size < 0.0995) return `${(1000 * value).toFixed(size < 0.00995 ? 1 : 0)} ms`;
  return size < 99.5 ? `${value.toFixed(size < 9.95 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export const count = (value) => (isNumber(value) ? String(Math.round(value)) : "–");
export const share = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");
export const ratio = (value) => (isNumber(value) ? value.toFixed(2) : "–");

export function clock(unix) {
  return isNumber(unix) ? new Date(1000 * unix).toTimeString().slice(0, 8) : "–";
}

export function quantile(sorted, at) {
  if (!sorted.length) return NaN;
  const place = at * (sorted.length - 1), low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}
