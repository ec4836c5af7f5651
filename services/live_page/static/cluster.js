// Instances as lanes: what they do, and their requests as bars from their placement to their predicted ends.

import { count, el, isNumber, ratio, seconds, setText, table } from "./dom.js";
import { colors, drawLane, slotsOf } from "./drawing.js";
import { errorOf, predictedEnd } from "./state.js";

const BACK = 0.4; // share of the window that has passed
const STALE_S = 3;

export class ClusterView {
  constructor(page) {
    this.page = page;
    this.lanes = new Map();
    this.slots = new Map(); // by instance: slot by request
    this.hits = new Map();
    this.opened = null; // the instance whose requests are listed
    this.visible = new Set();
  }

  mount(root) {
    this.lanes.clear();
    this.list = el("ol", { class: "lanes", "aria-label": "Instances" });
    this.detail = el("section", { id: "instance-requests", "aria-live": "off" });
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) this.visible[entry.isIntersecting ? "add" : "delete"](entry.target.dataset.instance);
    });
    this.summary = el("p", { class: "dim", id: "cluster-summary" });
    root.append(this.summary, el("p", { class: "legend" },
      el("span", {}, "▬ filled: under way or ended"), el("span", {}, "▭ outline: still predicted"),
      el("span", {}, "◇ predicted end"), el("span", {}, "❘ real end"), el("span", {}, "─ thin line: later than predicted")), this.list, this.detail);
  }

  unmount() {
    this.watcher.disconnect();
    this.visible.clear();
  }

  draw(state, now) {
    const span = this.page.span, from = now - BACK * span, to = now + (1 - BACK) * span;
    const palette = colors();
    const ids = [...state.instances.keys()].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    this.arrange(ids);
    const height = ids.length <= 8 ? 84 : ids.length <= 24 ? 60 : 44;
    let running = 0, waiting = 0, bad = 0;
    if (!state.isLive) for (const one of state.requests.values()) running += state.isOpen(one, now) ? 1 : 0;
    for (const id of ids) {
      const one = state.instances.get(id);
      running += one.num_running ?? 0;
      waiting += one.num_waiting ?? 0;
      bad += one.state === "ready" || !state.isLive ? 0 : 1;
      const lane = this.lanes.get(id);
      this.fill(lane, one, state, now);
      if (lane.height !== height) lane.canvas.style.height = `${height}px`;
      lane.height = height;
      if (!this.visible.has(id)) continue;
      const requests = state.requestsOf(id, from, now);
      const slots = slotsOf(requests, this.slots.get(id) ?? new Map());
      this.slots.set(id, slots);
      this.hits.set(id, drawLane(lane.canvas, state, requests, slots, { from, to, now, palette, height }));
    }
    const live = `${ids.length} instances, ${bad ? `${bad} not ready, ` : "all ready, "}${running} requests running, ${waiting} waiting in engines, ${count(state.waiting)} in the admission queue`;
    setText(this.summary, `${state.isLive ? live : `${ids.length} instances, ${running} requests under way`}. Bars from ${seconds(BACK * span)} ago to ${seconds((1 - BACK) * span)} ahead.`);
    if (this.opened && now - (this.listedAt ?? 0) >= 0.5) this.listRequests(state, now);
  }

  arrange(ids) {
    const same = ids.length === this.lanes.size && ids.every((id) => this.lanes.has(id));
    if (same) return;
    for (const [id, lane] of this.lanes) {
      if (ids.includes(id)) continue;
      this.watcher.unobserve(lane.node);
      this.visible.delete(id);
      lane.node.remove();
      this.lanes.delete(id);
      this.slots.delete(id);
    }
    for (const id of ids) {
      if (!this.lanes.has(id)) this.lanes.set(id, this.lane(id));
      this.list.append(this.lanes.get(id).node);
    }
  }

  lane(id) {
    const name = el("button", { class: "link name", type: "button", "aria-expanded": "false", onclick: () => this.open(id) }, id);
    const kind = el("span", { class: "state" });
    const values = {};
    const numbers = el("dl", { class: "numbers" }, [["running", "running"], ["waiting", "waiting"], ["reserved", "reserved"], ["blocks", "KV used"], ["drained", "drained in"], ["pace", "pace"]]
      .map(([key, label]) => el("div", {}, el("dt", {}, label), (values[key] = el("dd", { "data-value": key })))));
    const canvas = el("canvas", { "aria-hidden": "true", onclick: (event) => this.click(id, event) });
    const node = el("li", { class: "lane", "data-instance": id }, el("div", {}, name, el("br", {}), kind), numbers, canvas);
    this.watcher.observe(node);
    return { node, name, kind, values, canvas };
  }

  fill(lane, one, state, now) {
    const { values, kind } = lane;
    const used = isNumber(one.num_total_blocks) && isNumber(one.num_free_blocks) ? one.num_total_blocks - one.num_free_blocks : undefined;
    const reserved = one.num_reserved_blocks ? ` +${count(one.num_reserved_blocks)}` : "";
    const running = state.isLive ? one.num_running : state.requestsOf(one.id, now, now).filter((request) => state.isOpen(request, now)).length;
    setText(values.running, count(running));
    setText(values.waiting, count(one.num_waiting));
    setText(values.reserved, count(one.num_reserved));
    setText(values.blocks, used === undefined ? "–" : `${Math.round((100 * used) / one.num_total_blocks)} %${reserved}`);
    setText(values.drained, seconds(one.drained_s ?? state.drain(one.id, now)));
    setText(values.pace, ratio(one.pace));
    const isBad = one.state !== "ready" && state.isLive, age = now - one.reported;
    const parts = [isBad ? `✕ ${one.note || one.state}` : state.isLive ? "✓ ready" : "recorded"];
    if (one.role && one.role !== "both") parts.push(one.role);
    if (one.tier) parts.push(`tier ${one.tier}`);
    if (isNumber(one.tier_tpot_s)) parts.push(`TPOT ≤ ${seconds(one.tier_tpot_s)}`);
    if (state.isLive && !isBad && age > STALE_S) parts.push(`last report ${seconds(age)} ago`);
    setText(kind, parts.join(" · "));
    lane.node.classList.toggle("bad", isBad);
  }

  click(id, event) {
    const box = event.currentTarget.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const hit = (this.hits.get(id) ?? []).find((one) => x >= one.left && x <= one.right && y >= one.top && y <= one.bottom);
    if (hit) this.page.openDecision(hit.id);
    else this.open(id);
  }

  open(id) {
    this.opened = this.opened === id ? null : id;
    for (const [name, lane] of this.lanes) lane.name.setAttribute("aria-expanded", String(name === this.opened));
    this.listedAt = 0;
    this.detail.replaceChildren();
    if (this.opened) {
      this.listRequests(this.page.state, this.page.state.now());
      this.detail.scrollIntoView({ block: "nearest" });
    }
  }

  listRequests(state, now) {
    if (this.detail.contains(document.activeElement) && document.activeElement !== document.body) return; // do not move what is focused
    this.listedAt = now;
    const found = state.requestsOf(this.opened, now - this.page.span, now).sort((a, b) => b.decided - a.decided).slice(0, 60);
    const rows = found.map((one) => {
      const isOpen = state.isOpen(one, now), predicted = predictedEnd(one);
      const error = isOpen ? undefined : errorOf([one.predicted_e2e_s, one.e2e_s]);
      return [
        el("button", { class: "link", type: "button", onclick: () => this.page.openDecision(one.id) }, one.id),
        one.prefill === this.opened ? "prefill" : isOpen ? "under way" : one.end ?? "end not reported",
        count(one.prompt_tokens), count(one.tag_tokens), seconds(one.predicted_e2e_s),
        isOpen ? (predicted === undefined ? "–" : predicted > now ? `in ${seconds(predicted - now)}` : `${seconds(now - predicted)} late`) : seconds(one.e2e_s),
        error === undefined ? "" : `${error >= 0 ? "+" : "−"}${Math.abs(100 * error).toFixed(1)} %`,
      ];
    });
    this.detail.replaceChildren(el("h2", {}, `Requests of ${this.opened}`),
      table("the last ones", ["<request", "<state", "prompt tokens", "predicted tokens", "predicted e2e", "end", "predicted over actual"], rows, (at) => ({ "data-request": found[at].id })));
  }
}
