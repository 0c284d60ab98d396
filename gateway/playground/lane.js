// One generation on the page: its text step by step, its figures, the draft tree of the step that is selected.

import { drawHistogram, drawTree, label } from "./drawings.js";
import { completion } from "./stream.js";

const NUM_COLOURS = 4;

export class Lane {
  constructor(method, tip) {
    this.root = document.getElementById("lane").content.firstElementChild.cloneNode(true);
    this.method = method;
    this.tip = tip;
    this.steps = [];
    this.text = "";
    this.numTokens = 0;
    this.selected = -1;
    this.find("h2").append(method);
    const text = this.find(".text");
    text.addEventListener("keydown", (event) => this.onKey(event));
    text.addEventListener("click", (event) => this.select(this.indexOf(event.target), true));
    text.addEventListener("focusin", (event) => this.select(this.indexOf(event.target), false));
    text.addEventListener("pointerover", (event) => this.showTip(event));
    text.addEventListener("pointerout", () => (this.tip.hidden = true));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  /** Stream one completion into the lane; resolves to the seconds that it took, or null if it failed. */
  async run(body, key, signal) {
    this.began = performance.now();
    this.maxTokens = body.max_tokens;
    try {
      for await (const chunk of completion(body, key, signal)) {
        for (const choice of chunk.choices) this.take(choice);
        if (chunk.metrics) this.finish(chunk.metrics.speculative_decoding);
      }
    } catch (error) {
      const message = this.find(".error");
      message.textContent = error.name === "AbortError" ? "stopped" : error.message;
      message.hidden = false;
      return null;
    }
    return (this.ended - this.began) / 1000;
  }

  take(choice) {
    const now = performance.now();
    if (choice.token_ids.length) {
      this.first ??= now;
      this.ended = now;
    }
    let left = choice.token_ids.length, row = 0, rest = choice.text;
    for (const step of choice.steps) {
      const tokens = step.tokens.slice(0, left).map((token, index) => ({
        ...token,
        logprob: choice.logprobs?.token_logprobs[row + index],
        top: choice.logprobs?.top_logprobs?.[row + index],
        source: index < step.path.length ? step.nodes[step.path[index] - 1].source : "target",
      }));
      left -= tokens.length;
      row += tokens.length;
      // Several steps may come together; text held back, or left out at a stop, is missing at the end of their text.
      const whole = tokens.map((token) => token.text).join("");
      const text = step !== choice.steps.at(-1) && rest.startsWith(whole) ? whole : rest;
      rest = rest.slice(text.length);
      this.addStep(step, tokens, text);
    }
    this.text += choice.text;
    this.numTokens += choice.token_ids.length;
    this.find("progress").value = this.numTokens / this.maxTokens;
    this.showFigures();
  }

  /** text: what the step adds; it differs from its tokens' text where a character or a stop is held back. */
  addStep(step, tokens, text) {
    const index = this.steps.length, span = document.createElement("span");
    this.steps.push({ ...step, tokens, before: this.steps.at(-1)?.tokens.at(-1)?.text ?? "…" });
    span.className = `step c${index % NUM_COLOURS}`;
    span.dataset.step = index;
    span.tabIndex = index ? -1 : 0;
    span.setAttribute("role", "button");
    span.setAttribute("aria-pressed", "false");
    span.setAttribute("aria-label", `step ${index + 1}: ${JSON.stringify(tokens.map((token) => token.text).join(""))}`);
    const whole = tokens.map((token) => token.text).join("");
    const shown = text === whole ? tokens.map((token) => token.text) : [text];
    shown.forEach((piece, number) => {
      const token = document.createElement("span");
      const drafted = shown.length === tokens.length ? tokens[number].source !== "target" : tokens.length > 1;
      token.className = drafted ? "drafted" : "target";
      token.dataset.token = number;
      token.textContent = piece;
      span.append(token);
    });
    const box = this.find(".text"), follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.append(span);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  indexOf(target) {
    return Number(target.closest?.(".step")?.dataset.step ?? -1);
  }

  onKey(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const goal = { Home: 0, End: this.steps.length - 1 }[event.key] ?? this.selected + (moves[event.key] ?? NaN);
    if (!(goal >= 0 && goal < this.steps.length)) return;
    event.preventDefault();
    this.select(goal, true);
  }

  /** Select a step and draw its tree. */
  select(index, focus) {
    if (index < 0 || index >= this.steps.length) return;
    const spans = this.find(".text").children, step = this.steps[index];
    if (this.selected >= 0) spans[this.selected].setAttribute("aria-pressed", "false");
    spans[this.selected >= 0 ? this.selected : 0].tabIndex = -1;
    this.selected = index;
    spans[index].setAttribute("aria-pressed", "true");
    spans[index].tabIndex = 0;
    if (focus) spans[index].focus();
    const tree = this.find(".tree");
    tree.hidden = false;
    tree.querySelector("figcaption").textContent =
      `Step ${index + 1} at position ${step.position}: ${step.nodes.length} tokens drafted, ${step.path.length} accepted, ` +
      `then the target's own ${label(step.tokens.at(-1)?.text ?? "", 20)}`;
    tree.querySelector(".scroll").replaceChildren(drawTree(step, step.before));
  }

  showTip(event) {
    const step = this.steps[this.indexOf(event.target)], number = event.target.dataset.token;
    if (!step || number === undefined) return;
    const token = step.tokens[Number(number)];
    const own = token.source === "target", top = Object.entries(token.top ?? {});
    const lines = [
      `${label(token.text, 24)} (id ${token.id})`,
      own ? "the target's own token" : `drafted by ${token.source}, depth ${Number(number) + 1}`,
      token.logprob === undefined ? "" : `log-probability ${token.logprob.toFixed(3)}`,
      top.length ? `most probable: ${top.map(([text, value]) => `${label(text)} ${value.toFixed(2)}`).join("  ")}` : "",
    ];
    this.tip.textContent = lines.filter(Boolean).join("\n");
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${Math.min(event.clientY + 16, innerHeight - this.tip.offsetHeight - 8)}px`;
  }

  showFigures(metrics) {
    const numSteps = this.steps.length, seconds = (this.ended - this.first) / 1000;
    const drafted = this.steps.reduce((sum, step) => sum + step.nodes.length, 0);
    const accepted = this.steps.reduce((sum, step) => sum + Math.min(step.path.length, step.tokens.length), 0);
    const firstLength = this.steps[0]?.tokens.length ?? 0;
    const figures = {
      Tokens: this.numTokens,
      "Tokens/s": seconds > 0 ? ((this.numTokens - firstLength) / seconds).toFixed(1) : "–",
      "First token": this.first ? `${((this.first - this.began) / 1000).toFixed(2)} s` : "–",
      Steps: metrics?.num_spec_steps ?? numSteps,
      "Acceptance length": (metrics?.mean_acceptance_length ?? 1 + accepted / Math.max(numSteps, 1)).toFixed(2),
      "Drafts accepted": drafted ? `${((100 * accepted) / drafted).toFixed(0)} %` : "–",
    };
    this.find(".figures").replaceChildren(
      ...Object.entries(figures).map(([name, value]) => {
        const row = document.createElement("div");
        row.append(Object.assign(document.createElement("dt"), { textContent: name }));
        row.append(Object.assign(document.createElement("dd"), { textContent: value }));
        return row;
      }),
    );
  }

  finish(metrics) {
    this.find("progress").value = 1;
    this.showFigures(metrics);
    const histogram = this.find(".histogram");
    histogram.hidden = false;
    histogram.querySelector("div").replaceChildren(drawHistogram(metrics.acceptance_histogram));
    if (this.selected < 0) {
      const longest = this.steps.reduce((best, step, index) => (step.path.length > this.steps[best].path.length ? index : best), 0);
      this.select(longest, false);
    }
  }

  badge(text) {
    this.find("h2").append(Object.assign(document.createElement("span"), { className: "badge", textContent: text }));
  }
}
