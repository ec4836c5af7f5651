// Forecasts beside outcomes.

import { RedrawnView, count, el, quantile, seconds, share, table } from "./dom.js";
import { lines, scatter, seriesMark } from "./drawing.js";
import { errorOf } from "./state.js";

const SERIES = 4; // instances drawn apart; the others together
const MAX_POINTS = 600;
const BUCKETS = 30;

export class AccuracyView extends RedrawnView {
  constructor(page) {
    super(page, 2000);
    this.what = "e2e";
  }

  mount(root) {
    const choose = el("select", { onchange: (event) => { this.what = event.target.value; this.drawnAt = undefined; } },
      [["e2e", "e2e"], ["ttft", "TTFT"]].map(([value, label]) => el("option", { value, selected: value === this.what }, label)));
    root.append(el("p", {}, el("label", {}, "Latency ", choose)));
    super.mount(root);
  }

  contents(state, now) {
    const known = state.errors.filter((one) => one.at <= now && errorOf(one[this.what]) !== undefined);
    if (!known.length) return [el("p", {}, "No request with a forecast has ended since the page was opened.")];
    const byInstance = new Map();
    for (const one of known) byInstance.set(one.instance, [...(byInstance.get(one.instance) ?? []), one]);
    const names = [...byInstance.keys()].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const groups = names.length <= SERIES + 1 ? names.map((name) => [name]) : [...names.slice(0, SERIES).map((name) => [name]), names.slice(SERIES)];
    const labels = groups.map((group) => (group.length === 1 ? group[0] : `${group.length} others`));
    const series = groups.map((group) => group.flatMap((name) => byInstance.get(name)));
    const legend = el("p", { class: "legend" }, labels.map((label, at) => el("span", {}, seriesMark(at), " ", label)));
    const every = Math.max(1, Math.ceil(known.length / MAX_POINTS));
    const points = series.map((group) => group.filter((_, at) => at % every === 0).map((one) => one[this.what]));
    const start = Math.min(...known.map((one) => one.at));
    const overTimes = series.map((group) => overTime(group, this.what, start));
    const rows = [["all", known], ...names.map((name) => [name, byInstance.get(name)])].map(([name, group]) => summary(name, group.map((one) => errorOf(one[this.what]))));
    return [legend, el("div", { class: "columns" },
      el("figure", {}, el("figcaption", {}, "actual, in s, against predicted, in s; on the dashed line both are equal"), scatter("predicted, s", points) ?? "–"),
      el("figure", {}, el("figcaption", {}, "median error over time"),
        overTimes.some((group) => group.length > 1) && lines("seconds since the first", overTimes, { xText: (value) => count(value), yText: (value) => `${Math.round(100 * value)} %` }) || "after some seconds more")),
      table("predicted against actual, of completed requests since the page was opened", ["<instance", "requests", "median error", "P90 error", "bias"], rows, (at) => ({ "data-instance": at ? names[at - 1] : "all" })),
      ...this.totals(state)];
  }

  // The scheduler's own averages, since it started and uncorrected.
  totals(state) {
    const sums = new Map(state.samples("block_scheduler_forecast_error_ratio_sum").map(([labels, value]) => [labels.instance, value]));
    const rows = state.samples("block_scheduler_forecast_error_ratio_count").filter(([, num]) => num > 0)
      .map(([labels, num]) => [labels.instance, count(num), share((sums.get(labels.instance) ?? NaN) / num)]);
    return rows.length ? [el("h2", {}, "Since the scheduler started"), table("mean error of uncorrected forecasts of e2e", ["<instance", "requests", "mean error"], rows)] : [];
  }
}

function summary(name, errors) {
  const sizes = errors.map(Math.abs).sort((a, b) => a - b), signed = [...errors].sort((a, b) => a - b);
  return [name, count(errors.length), share(quantile(sizes, 0.5)), share(quantile(sizes, 0.9)), share(quantile(signed, 0.5))];
}

function overTime(group, what, start) {
  const last = Math.max(...group.map((one) => one.at)), width = Math.max(5, (last - start) / BUCKETS);
  const buckets = new Map();
  for (const one of group) {
    const at = Math.floor((one.at - start) / width);
    buckets.set(at, [...(buckets.get(at) ?? []), Math.abs(errorOf(one[what]))]);
  }
  return [...buckets].sort((a, b) => a[0] - b[0]).map(([at, errors]) => [(at + 0.5) * width, quantile(errors.sort((a, b) => a - b), 0.5)]);
}
