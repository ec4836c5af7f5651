// What requests with targets attained, the admission queue, and what was shed: the counters of /metrics.

import { RedrawnView, count, el, seconds, share, table } from "./dom.js";
import { lines, whole } from "./drawing.js";

const TARGETS = { ttft: "TTFT", tpot: "mean TPOT", slo: "all targets", deadlines: "every token" };

export class SlosView extends RedrawnView {
  contents(state, now) {
    const note = state.isLive ? [] : [el("p", {}, "A recording has no counters; attainment is that of a live system.")];
    return [...note, ...byClass(state), ...byClient(state), ...queue(state, now), ...shed(state), ...ends(state)];
  }
}

function byClass(state) {
  const attained = new Map(state.samples("block_gateway_targets_attained_total").map(([labels, value]) => [keyOf(labels), value]));
  const groups = state.samples("block_gateway_targets_total").filter(([, num]) => num > 0);
  const rows = groups.map(([labels, num]) => [labels.class, labels.priority, TARGETS[labels.target] ?? labels.target, count(num), count(attained.get(keyOf(labels)) ?? 0), share((attained.get(keyOf(labels)) ?? 0) / num)]);
  return [el("h2", {}, "Attainment by class"), rows.length
    ? table("requests with targets, since the gateway started", ["<class", "priority", "<target", "requests", "attained", "share"], rows, (at) => ({ "data-target": groups[at][0].target, "data-class": groups[at][0].class }))
    : el("p", {}, "No streamed request had a target yet (or this server does not see responses: ask the gateway).")];
}

function byClient(state) {
  const attained = new Map(state.samples("block_gateway_slo_attained_total").map(([labels, value]) => [keyOf(labels), value]));
  const groups = state.samples("block_gateway_slo_requests_total").sort((a, b) => a[0].tpot_slo - b[0].tpot_slo);
  if (!groups.length) return [];
  const line = ([labels, num]) => [labels.tpot_slo ? seconds(Number(labels.tpot_slo)) : "none", labels.client || "(no name)", count(num), count(attained.get(keyOf(labels)) ?? 0), share((attained.get(keyOf(labels)) ?? 0) / num)];
  return [el("h2", {}, "Attainment by tier and client"), table("a tier is a TPOT target", ["TPOT target", "<client", "requests", "attained", "share"], groups.map(line),
    (at) => ({ "data-client": groups[at][0].client, "data-tpot": groups[at][0].tpot_slo, "data-requests": groups[at][1], "data-attained": attained.get(keyOf(groups[at][0])) ?? 0 }))];
}

function queue(state, now) {
  const history = state.history.filter((one) => one.at <= now);
  const chart = lines("seconds from now", [history.map((one) => [one.at - now, one.held])], { xText: count, yText: whole, isStep: true });
  const waiting = state.said("waiting_by_tpot_slo").flat().map(([target, num]) => [seconds(target), count(num)]);
  return [el("h2", {}, "Admission queue"), el("p", { id: "held" }, `${count(state.waiting)} requests wait`),
    el("div", { class: "columns" }, chart ? el("figure", {}, chart) : "", waiting.length ? table("by TPOT target", ["target", "requests"], waiting) : "")];
}

function shed(state) {
  const groups = state.samples("block_scheduler_shed_total").filter(([, num]) => num > 0);
  const demoted = sum(state.samples("block_scheduler_demoted_total")), undecided = sum(state.samples("block_undecided_total"));
  const lines = [el("h2", {}, "Shed"), el("p", {}, `${count(sum(groups))} requests shed, ${count(demoted)} demoted to best effort, ${count(undecided)} without an instance`)];
  if (groups.length) lines.push(table("by reason", ["<reason", "<class", "requests"], groups.map(([labels, num]) => [labels.reason, labels.class, count(num)]), (at) => ({ "data-shed": groups[at][0].reason })));
  return lines;
}

function ends(state) {
  const groups = state.samples("block_gateway_finished_total").filter(([, num]) => num > 0);
  return groups.length ? [el("h2", {}, "Responses"), table("by how they ended", ["<model", "<end", "responses"], groups.map(([labels, num]) => [labels.model, labels.reason, count(num)]))] : [];
}

const keyOf = (labels) => JSON.stringify(Object.entries(labels).sort());
const sum = (samples) => samples.reduce((total, [, value]) => total + value, 0);
