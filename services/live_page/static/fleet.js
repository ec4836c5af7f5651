// How many instances there are over time, and what a provisioner plans.

import { RedrawnView, clock, count, el, seconds, table } from "./dom.js";
import { lines, seriesMark, whole } from "./drawing.js";

export class FleetView extends RedrawnView {
  contents(state, now) {
    const history = state.history.filter((one) => one.at <= now);
    const of = (name) => history.map((one) => [one.at - now, one[name]]);
    const legend = (names) => el("p", { class: "legend" }, names.map((name, at) => el("span", {}, seriesMark(at), " ", name)));
    const chart = (names, series) => {
      const drawn = lines("seconds from now", series, { xText: count, yText: whole, isStep: true });
      return drawn ? el("figure", {}, legend(names), drawn) : "";
    };
    return [el("h2", {}, "Instances over time"), el("div", { class: "columns" },
      chart(["ready", "not ready"], [of("ready"), of("other")]), chart(["running", "waiting in engines", "in the admission queue"], [of("running"), of("waiting"), of("held")])),
      ...tiers(state), ...provisioner(state.said("provisioning").at(-1))];
  }
}

function tiers(state) {
  const groups = new Map();
  for (const one of state.instances.values()) {
    const key = [one.role ?? "both", one.tier ?? "", one.state].join("\u0000");
    groups.set(key, [...(groups.get(key) ?? []), one.id]);
  }
  const rows = [...groups].map(([key, ids]) => [...key.split("\u0000"), count(ids.length), ids.length > 6 ? `${ids.slice(0, 6).join(", ")}, …` : ids.join(", ")]);
  return [el("h2", {}, "Now"), table("by role, tier and state", ["<role", "<tier", "<state", "instances", "<names"], rows)];
}

function provisioner(found) {
  if (!found) return [el("p", { class: "dim" }, "No provisioner is known to this scheduler.")];
  if (found.error) return [el("h2", {}, "Provisioner"), el("p", { role: "alert" }, found.error)];
  return [el("h2", {}, "Provisioner"),
    table("pools", ["<pool", "desired", "ready", "starting", "draining", "at least", "at most", "P99 of forecasts", "learnt cold start"], found.pools.map((one) => [
      one.pool, count(one.desired), count(one.ready), count(one.starting), count(one.draining), count(one.min), count(one.max), seconds(one.forecast_p99_s), seconds(one.cold_start_s)]), (at) => ({ "data-pool": found.pools[at].pool })),
    found.actions.length ? table("planned and last actions", ["<time", "<action", "<state", "instances", "<why"], found.actions.map((one) => [clock(one.at), one.kind, one.state, count(one.num), one.why]))
      : el("p", {}, "No action yet.")];
}
