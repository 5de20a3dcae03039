// Shows one run: its speed, its text with the origin of each token, and its lanes.

import { byId, html } from "./elements.js";
import { Lanes } from "./lanes.js";
import { factsOf, rateOf } from "./run.js";
import { NAMES } from "./tree.js";

export class RunView {
  constructor(title, run, before) {
    this.run = run;
    this.element = byId("run-template").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h2").textContent = title;
    this.rate = this.element.querySelector(".rate strong");
    this.facts = this.element.querySelector(".facts");
    this.text = this.element.querySelector(".text");
    this.text.setAttribute("aria-label", `Text: ${title.toLowerCase()}`);
    this.lanes = new Lanes(this.element.querySelector(".lanes"), before?.lanes);
    this.marked = null;
  }

  /** Show the run as it is now, and the step that is looked at. False once nothing moves any more. */
  show(step, still) {
    this.rate.textContent = rateOf(this.run)?.toFixed(1) ?? "–";
    this.facts.textContent = factsOf(this.run).join(" · ");
    this.append();
    this.mark(step);
    return this.lanes.show(this.run, step, still);
  }

  append() {
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    for (const piece of this.run.pieces.slice(this.text.childElementCount)) {
      const token = html("span", "token", piece.text);
      token.dataset.origin = piece.origins[0];
      token.dataset.step = piece.step;
      token.title = `${piece.origins.map((origin) => NAMES[origin]).join(", ")}; step ${this.run.steps[piece.step]?.number}`;
      this.text.append(token);
    }
    if (atEnd && !this.run.complete) {
      this.text.scrollTop = this.text.scrollHeight;
    }
  }

  mark(step) {
    if (step === this.marked) {
      return;
    }
    this.marked = step;
    this.text.querySelectorAll(".marked").forEach((token) => token.classList.remove("marked"));
    const tokens = this.text.querySelectorAll(`[data-step="${step}"]`);
    tokens.forEach((token) => token.classList.add("marked"));
    if (tokens.length) {
      this.reveal(tokens[0]);
    }
  }

  /** Scroll the text, and not the page, so that a token can be seen. */
  reveal(token) {
    const above = token.offsetTop < this.text.scrollTop;
    const below = token.offsetTop + token.offsetHeight > this.text.scrollTop + this.text.clientHeight;
    if (above || below) {
      this.text.scrollTop = token.offsetTop - this.text.clientHeight / 2;
    }
  }
}
