// What the page knows: instances, requests, counters, and how they have changed.

import { isNumber } from "./dom.js";

const MAX_REQUESTS = 4000;
const MAX_ERRORS = 3000;
const MAX_HISTORY = 1800; // moments
const FORGET_S = 200; // after its end a request leaves the live page

export class State {
  constructor() {
    this.clear();
    this.pausedAt = null;
    this.recorded = null; // {from, to} of a recording
    this.offset = 0; // of the server's clock
  }

  clear() {
    this.instances = new Map();
    this.requests = new Map();
    this.byInstance = new Map(); // requests by id, by instance of any leg
    this.errors = []; // {at, instance, predicted, actual} by name of latency
    this.sources = new Map(); // by who sent a frame: its counters, and what it says of itself
    this.history = []; // {at, ready, bad, running, waiting, held}
    this.version = 0;
  }

  now() {
    return this.pausedAt ?? Date.now() / 1000 + this.offset;
  }

  get isLive() {
    return this.recorded === null;
  }

  take(frame) {
    if (frame.reset) {
      const { errors, history } = this;
      this.clear();
      this.errors = errors;
      this.history = history;
    }
    if (frame.recorded) this.recorded = frame.recorded;
    this.version += 1;
    this.offset = frame.now - Date.now() / 1000;
    const source = this.sources.get(frame.from) ?? {};
    this.sources.set(frame.from, source);
    for (const name of ["scheduler", "policy", "waiting", "waiting_by_tpot_slo", "provisioning", "source", "counters"]) {
      if (name in frame) source[name] = frame[name];
    }
    if (frame.all) { // one of several schedulers says all that it knows
      const known = new Set(frame.instances.map((one) => one.id));
      for (const id of this.instances.keys()) if (!known.has(id)) this.instances.delete(id);
    }
    for (const one of frame.instances ?? []) {
      this.instances.set(one.id, { ...one, reported: isNumber(one.age_s) ? frame.now - one.age_s : undefined });
    }
    for (const id of frame.gone ?? []) this.instances.delete(id);
    for (const one of frame.placed ?? []) this.place(one);
    for (const one of frame.ended ?? []) this.end(one, frame.now);
    if (this.isLive) this.remember(frame);
  }

  place(one) {
    const known = this.requests.get(one.id);
    if (known) this.remove(known);
    this.requests.set(one.id, one);
    for (const instance of [one.instance, one.prefill]) {
      if (!instance) continue;
      if (!this.byInstance.has(instance)) this.byInstance.set(instance, new Map());
      this.byInstance.get(instance).set(one.id, one);
    }
    if (one.end && !known?.end) this.measure(one);
    if (this.isLive && this.requests.size > MAX_REQUESTS) this.remove(this.requests.values().next().value);
  }

  remove(one) {
    this.requests.delete(one.id);
    for (const instance of [one.instance, one.prefill]) this.byInstance.get(instance)?.delete(one.id);
  }

  end(outcome, now) {
    const one = this.requests.get(outcome.id);
    if (!one) return;
    Object.assign(one, outcome);
    one.ended = outcome.ended ?? (isNumber(one.e2e_s) ? one.arrived + one.e2e_s : now);
    this.measure(one);
  }

  measure(one) {
    if (one.end !== "stop" && one.end !== "length") return;
    this.errors.push({
      at: one.ended ?? one.arrived + one.e2e_s, instance: one.instance, id: one.id,
      ttft: [one.predicted_ttft_s, one.ttft_s], e2e: [one.predicted_e2e_s, one.e2e_s],
    });
    if (this.errors.length > MAX_ERRORS && this.isLive) this.errors.shift();
  }

  remember(frame) {
    const last = this.history.at(-1);
    if (last && frame.now - last.at < 1) return;
    const all = [...this.instances.values()];
    const sum = (name) => all.reduce((total, one) => total + (one[name] ?? 0), 0);
    const ready = all.filter((one) => one.state === "ready").length;
    this.history.push({
      at: frame.now, ready, other: all.length - ready,
      running: sum("num_running"), waiting: sum("num_waiting"), held: this.waiting,
    });
    if (this.history.length > MAX_HISTORY) this.history.shift();
    for (const one of this.requests.values()) {
      if (frame.now - (one.ended ?? predictedEnd(one) ?? one.decided) <= FORGET_S) break;
      this.remove(one);
    }
  }

  // How long until the last request of an instance ends, as predicted.
  drain(instance, now) {
    let last = -Infinity;
    for (const one of this.byInstance.get(instance)?.values() ?? []) {
      if (one.instance === instance && this.isOpen(one, now)) last = Math.max(last, predictedEnd(one) ?? -Infinity);
    }
    return last === -Infinity ? undefined : Math.max(0, last - now);
  }

  // The requests of an instance that a time window shows, by their placement.
  requestsOf(instance, from, to) {
    const found = [];
    for (const one of this.byInstance.get(instance)?.values() ?? []) {
      if (one.decided <= to && this.endOf(one, to) >= from) found.push(one);
    }
    return found;
  }

  // When a request ended, as known at a time; a request whose end was never reported ends at its predicted end.
  endOf(one, now) {
    if (isNumber(one.ended) && one.ended <= now) return one.ended;
    if (one.end === undefined && !this.isKnownOpen(one, now)) return predictedEnd(one) ?? one.decided;
    return now;
  }

  // An end may be reported elsewhere; long after the predicted end a request is no longer shown as under way.
  isKnownOpen(one, now) {
    const predicted = predictedEnd(one) ?? one.decided + 60;
    if (one.is_old) return now < predicted; // placed before the page was opened, so that its end may have been missed
    return now < predicted + Math.max(30, predicted - one.decided);
  }

  isOpen(one, now) {
    return one.decided <= now && !(isNumber(one.ended) && one.ended <= now) && (one.end !== undefined || this.isKnownOpen(one, now));
  }

  // The number of requests in admission queues.
  get waiting() {
    return [...this.sources.values()].reduce((total, one) => total + (one.waiting ?? 0), 0);
  }

  // What the sources say of something, each once.
  said(name) {
    return [...new Set([...this.sources.values()].map((one) => one[name]).filter((value) => value !== undefined))];
  }

  // Samples of a metric, summed over the sources: [labels, value].
  samples(name) {
    const sums = new Map();
    for (const source of this.sources.values()) {
      for (const [metric, labels, value] of source.counters ?? []) {
        if (metric !== name) continue;
        const key = JSON.stringify(labels), known = sums.get(key);
        if (known) known[1] += value;
        else sums.set(key, [labels, value]);
      }
    }
    return [...sums.values()];
  }
}

export function predictedEnd(one) {
  return isNumber(one.predicted_e2e_s) ? one.arrived + one.predicted_e2e_s : undefined;
}

export function errorOf([predicted, actual]) {
  return isNumber(predicted) && isNumber(actual) && actual > 0 ? predicted / actual - 1 : undefined;
}
