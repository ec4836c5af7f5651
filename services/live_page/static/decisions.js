// The last decisions, and one of them with all its candidates.

import { clock, count, el, isNumber, seconds, table } from "./dom.js";
import { errorOf } from "./state.js";

const SHOWN = 60;
const FATES = {
  forecast: "compared by its forecast", indicators: "compared by indicators", last_indicators: "late: compared by its last indicators",
  not_shortlisted: "not on the shortlist", filtered: "left out by the policy", refused: "refused", late: "skipped: no answer in time",
  down: "skipped: down", excluded: "left out by the caller", invalid: "skipped: invalid answer", unspecified: "not asked",
};
const INDICATORS = {
  num_running: "running", num_waiting: "waiting", num_reserved: "reserved", num_free_blocks: "free KV blocks",
  queued_prefill_tokens: "queued prompt tokens",
};

export class DecisionsView {
  constructor(page) {
    this.page = page;
    this.request = null;
  }

  mount(root) {
    this.list = el("section", { "aria-label": "Last decisions" });
    this.detail = el("section", { id: "decision", "aria-live": "polite" });
    this.find = el("input", { type: "search", placeholder: "request id", "aria-label": "Request id" });
    const form = el("form", { onsubmit: (event) => { event.preventDefault(); this.page.openDecision(this.find.value.trim()); } }, this.find, " ", el("button", { type: "submit" }, "Explain"));
    form.style.padding = "0";
    root.append(form, this.detail, this.list);
    this.drawnAt = -1;
    if (this.request) this.open(this.request);
  }

  draw(state, now) {
    if (this.drawnAt === state.version || this.list.contains(document.activeElement)) return;
    if (state.isLive && this.drawnSince && performance.now() - this.drawnSince < 900) return;
    this.drawnAt = state.version;
    this.drawnSince = performance.now();
    const last = [];
    for (const one of [...state.requests.values()].reverse()) {
      if (one.decided <= now) last.push(one);
      if (last.length >= SHOWN) break;
    }
    const rows = last.map((one) => {
      const error = errorOf([one.predicted_e2e_s, one.e2e_s]);
      return [
        clock(one.decided), el("button", { class: "link", type: "button", onclick: () => this.page.openDecision(one.id) }, one.id),
        one.prefill ? `${one.prefill} → ${one.instance}` : one.instance, one.policy ?? "", seconds(one.decision_s),
        count(one.candidates), count(one.skipped), seconds(one.predicted_ttft_s), seconds(one.ttft_s), seconds(one.predicted_e2e_s), seconds(one.e2e_s),
        error === undefined ? "" : `${error >= 0 ? "+" : "−"}${Math.abs(100 * error).toFixed(1)} %`, one.end ?? "", one.demoted ? "demoted" : "",
      ];
    });
    this.list.replaceChildren(el("h2", {}, "Last decisions"), table(
      state.isLive ? "under much load a sample; every second" : "of the recording",
      ["<time", "<request", "<instance", "<policy", "decided in", "candidates", "skipped", "TTFT predicted", "actual", "e2e predicted", "actual", "predicted over actual", "<end", "<note"],
      rows, (at) => ({ "data-request": last[at].id })));
  }

  async open(requestId) {
    this.request = requestId;
    this.detail.replaceChildren(el("p", {}, "…"));
    let decision;
    try {
      decision = await this.page.feed.decision(requestId);
    } catch (error) {
      this.detail.replaceChildren(el("h2", {}, requestId), el("p", { role: "alert" }, error.message));
      return;
    }
    if (this.request === requestId) this.show(decision);
  }

  show(decision) {
    const chosen = new Set([decision.instance?.instance_id, decision.prefill?.instance?.instance_id]);
    const scoreOf = (one) => (isNumber(one.score) ? one.score : Infinity);
    const candidates = [...decision.candidates].sort((a, b) => chosen.has(b.instance_id) - chosen.has(a.instance_id) || scoreOf(a) - scoreOf(b) || a.instance_id.localeCompare(b.instance_id));
    const longest = Math.max(0, ...candidates.map((one) => finite(one.forecast?.e2e_s)));
    const read = [...new Set(candidates.flatMap((one) => Object.keys(one.indicators ?? {})))].filter((name) => Object.hasOwn(INDICATORS, name));
    const rows = candidates.map((one) => [
      chosen.has(one.instance_id) ? `→ ${one.instance_id}` : one.instance_id, FATES[one.fate] ?? one.fate,
      isNumber(one.score) ? String(Number(one.score.toPrecision(4))) : "–", seconds(one.forecast?.ttft_s), seconds(one.forecast?.e2e_s), picture(one.forecast, longest),
      seconds(one.indicators?.age_s), seconds(one.answered_s), ...read.map((name) => (isNumber(one.indicators?.[name]) ? String(Number(one.indicators[name].toPrecision(6))) : "–")), one.note ?? "",
    ]);
    const outcome = this.page.state.requests.get(decision.request_id);
    const facts = [`by ${decision.policy}, on ${decision.basis}, in ${seconds(decision.decision_s)}, by ${decision.scheduler_id ?? "this scheduler"}`];
    if (decision.tag) facts.push(`length ${Number((decision.tag.median_tokens ?? 0).toPrecision(4))} tokens, by ${decision.tag.estimator || "the request"}`);
    facts.push(`${decision.num_candidates ?? 0} candidates, ${decision.num_skipped ?? 0} skipped`);
    if (outcome && isNumber(outcome.e2e_s)) facts.push(`actual: TTFT ${seconds(outcome.ttft_s)}, e2e ${seconds(outcome.e2e_s)} (${outcome.end})`);
    this.detail.replaceChildren(el("h2", {}, `${decision.request_id} → ${decision.instance?.instance_id ?? "nowhere"}`),
      el("p", {}, decision.why ?? ""), el("p", { class: "dim" }, facts.join(" · ")),
      rows.length ? table("candidates, the chosen one first; the bar is the predicted latency, its dark part the time to first token",
        ["<instance", "<how it was treated", "score", "TTFT", "e2e", "<forecast", "age of state", "answered in", ...read.map((name) => INDICATORS[name]), "<note"], rows,
        (at) => ({ "data-candidate": candidates[at].instance_id, class: chosen.has(candidates[at].instance_id) && "chosen" }))
        : el("p", {}, "The candidates of this decision were not recorded (block serve scheduler --record-candidates records them)."));
  }
}

const finite = (value) => (isNumber(value) ? value : 0);

function picture(forecast, longest) {
  if (!forecast || !longest || !isNumber(forecast.e2e_s)) return "";
  const first = el("span", { class: "bar" }), rest = el("span", { class: "bar" }), track = el("span", { class: "track" }, first, rest);
  first.style.width = `${(100 * finite(forecast.ttft_s)) / longest}%`;
  rest.style.width = `${(100 * (forecast.e2e_s - finite(forecast.ttft_s))) / longest}%`;
  rest.style.opacity = "0.45";
  return track;
}
