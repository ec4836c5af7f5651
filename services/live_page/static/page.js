// The page: views as tabs, the key, time, and drawing a few times per second while it is visible.

import { AccuracyView } from "./accuracy.js";
import { ClusterView } from "./cluster.js";
import { DecisionsView } from "./decisions.js";
import { clock, count, el, seconds, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { FleetView } from "./fleet.js";
import { SlosView } from "./slos.js";
import { State } from "./state.js";

const DRAW_MS = 250;
const KEY = "block-key";
const byId = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.state = new State();
    this.feed = new Feed((frame) => this.take(frame), (text, isBad) => this.say(text, isBad));
    this.views = {
      cluster: ["Cluster", new ClusterView(this)], decisions: ["Decisions", new DecisionsView(this)], accuracy: ["Accuracy", new AccuracyView(this)],
      slos: ["SLOs", new SlosView(this)], fleet: ["Provisioning", new FleetView(this)],
    };
    this.tabs = new Map();
    this.current = null;
    this.error = "";
    this.feed.key = sessionStorage.getItem(KEY) ?? "";
  }

  get span() {
    return Number(byId("span").value);
  }

  start() {
    const names = Object.keys(this.views);
    for (const name of names) {
      const tab = el("button", { role: "tab", type: "button", id: `tab-${name}`, "aria-selected": "false", "aria-controls": "view", tabindex: "-1", onclick: () => this.go(name) }, this.views[name][0]);
      this.tabs.set(name, tab);
      byId("tabs").append(tab);
    }
    byId("tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = names[(names.indexOf(this.current) + step + names.length) % names.length];
      this.go(next);
      this.tabs.get(next).focus();
    });
    byId("pause").addEventListener("click", () => this.pause(this.state.pausedAt === null));
    byId("time").addEventListener("input", (event) => this.goTo(Number(event.target.value)));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.feed.key = byId("key").value;
      sessionStorage.setItem(KEY, this.feed.key);
      byId("key").value = "";
      this.follow();
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, button")) return;
      if (event.key === " ") {
        event.preventDefault();
        this.pause(this.state.pausedAt === null);
      } else if (names[Number(event.key) - 1]) this.go(names[Number(event.key) - 1]);
    });
    window.addEventListener("hashchange", () => this.show());
    this.show();
    setInterval(() => this.draw(), DRAW_MS);
    this.follow();
  }

  async follow() {
    byId("key-form").hidden = true;
    byId("view").hidden = false;
    const end = await this.feed.follow();
    if (end === "key") {
      sessionStorage.removeItem(KEY);
      byId("key-form").hidden = false;
      byId("view").hidden = true;
      this.say(this.feed.key ? "this key may not open the page" : "an API key is needed", true);
      byId("key").focus();
    }
  }

  go(name) {
    if (location.hash === `#${name}`) this.show();
    else location.hash = name;
  }

  openDecision(requestId) {
    if (!requestId) return;
    const view = this.views.decisions[1];
    view.request = requestId;
    if (this.current === "decisions") view.open(requestId);
    else this.go("decisions");
    window.scrollTo({ top: 0 });
  }

  show() {
    const asked = location.hash.slice(1), name = Object.hasOwn(this.views, asked) ? asked : "cluster";
    if (name === this.current) return;
    if (this.current) this.views[this.current][1].unmount?.();
    this.current = name;
    for (const [other, tab] of this.tabs) {
      tab.setAttribute("aria-selected", String(other === name));
      tab.setAttribute("tabindex", other === name ? "0" : "-1");
    }
    byId("view").replaceChildren();
    byId("view").setAttribute("aria-labelledby", `tab-${name}`);
    this.views[name][1].mount(byId("view"));
    this.drawn = null;
    this.draw();
    setTimeout(() => { this.drawn = null; }, 2 * DRAW_MS); // lanes are drawn once they are known to be visible
  }

  take(frame) {
    this.error = "";
    this.state.take(frame);
    if (frame.recorded) {
      const slider = byId("time");
      byId("timeline").hidden = false;
      byId("pause").hidden = true;
      slider.max = frame.recorded.to - frame.recorded.from;
      this.goTo(Math.min(Number(slider.max), 0.5 * Number(slider.max)));
      slider.value = this.state.pausedAt - frame.recorded.from;
    }
  }

  goTo(offset) {
    this.state.pausedAt = this.state.recorded.from + offset;
    this.state.version += 1;
    setText(byId("time-text"), `${seconds(offset)} · ${clock(this.state.pausedAt)}`);
    this.draw();
  }

  pause(isPaused) {
    if (!this.state.isLive) return;
    this.state.pausedAt = isPaused ? this.state.now() : null;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    setText(byId("pause"), isPaused ? "Continue" : "Pause");
  }

  say(text, isBad) {
    this.error = isBad ? text : "";
    this.about();
  }

  about() {
    const sources = this.state.said("source"), names = sources.length ? sources : this.state.said("scheduler");
    const policies = this.state.said("policy");
    const text = this.error || [...names, policies.length && `policy ${policies.join(", ")}`, `${count(this.state.instances.size)} instances`, this.state.pausedAt !== null && this.state.isLive && "paused"].filter(Boolean).join(" · ");
    setText(byId("about"), text);
    byId("about").classList.toggle("bad", Boolean(this.error));
  }

  draw() {
    if (document.hidden) return;
    this.about();
    const { pausedAt, version } = this.state, drawn = [pausedAt, version, this.current, this.span, window.innerWidth].join();
    if (pausedAt !== null && drawn === this.drawn) return; // nothing moves
    this.drawn = drawn;
    this.views[this.current][1].draw(this.state, this.state.now());
  }
}

const page = new Page();
page.start();
