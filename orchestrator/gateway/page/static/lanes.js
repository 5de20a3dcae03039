// Draws what draft, wire and target did when: a window of time that follows the newest bar.

import { svg } from "./elements.js";

const ROWS = { draft: 0, wire: 1, verify: 2 };
const MAX_BARS = 3000;
const STEPS_SHOWN = 8;
const MIN_WINDOW = 20_000;
const EASE = 0.2;

/** The lanes of one run. Times are in microseconds. */
export class Lanes {
  /** `first` are the lanes of the run before, whose scale these take. */
  constructor(element, first) {
    this.first = first;
    this.svg = element.querySelector("svg");
    this.scale = element.querySelector("small");
    this.element = element;
    this.mark = this.svg.appendChild(svg("rect", { class: "bar-marked", y: 0, height: 3, width: 0 }));
    this.drawn = 0;
    this.begin = null;
    this.window = MIN_WINDOW;
    this.right = 0;
  }

  /** Draw the run up to now; `marked` is the step to look at, null the newest. False once nothing moves any more. */
  show(run, marked, still) {
    for (; this.drawn < run.steps.length; this.drawn += 1) {
      run.steps[this.drawn].timeline.forEach((bar) => this.add(bar));
    }
    if (this.begin === null) {
      return false;
    }
    const shown = (STEPS_SHOWN * this.end(run, run.steps.length - 1)) / run.steps.length;
    this.window = this.first?.window ?? Math.max(MIN_WINDOW, shown);
    const goal = this.goal(run, marked);
    const left = goal - this.right;
    const near = still || Math.abs(left) < this.window / 500;
    this.right = near ? goal : this.right + left * EASE;
    this.svg.setAttribute("viewBox", `${this.right - this.window} 0 ${this.window} 3`);
    this.scale.textContent = `${(this.window / 1000).toFixed(0)} ms`;
    if (run.complete) {
      this.element.setAttribute("aria-label", spoken(run));
    }
    return !near;
  }

  add(bar) {
    this.begin ??= bar.start_us;
    const place = { x: bar.start_us - this.begin, width: Math.max(bar.duration_us, 1), y: ROWS[bar.lane] + 0.12 };
    const drawn = svg("rect", { class: `bar-${bar.lane}`, height: 0.76, ...place });
    this.svg.append(drawn);
    if (this.svg.childElementCount > MAX_BARS) {
      this.mark.nextSibling.remove();
    }
  }

  /** Where the window ends: at the newest bar, or so that the marked step is in its middle. */
  goal(run, marked) {
    if (marked === null) {
      this.mark.setAttribute("width", 0);
      return this.end(run, run.steps.length - 1);
    }
    const from = this.end(run, marked - 1);
    const to = this.end(run, marked);
    this.mark.setAttribute("x", from);
    this.mark.setAttribute("width", Math.max(0, to - from));
    return Math.min((from + to + this.window) / 2, this.end(run, run.steps.length - 1));
  }

  /** When a step was over. */
  end(run, index) {
    const ends = (run.steps[index]?.timeline ?? []).map((bar) => bar.start_us + bar.duration_us - this.begin);
    return Math.max(0, ...ends);
  }
}

function spoken(run) {
  const bars = run.steps.flatMap((step) => step.timeline);
  const sum = (lane) => bars.filter((bar) => bar.lane === lane).reduce((all, bar) => all + bar.duration_us, 0);
  return `Time spent: draft ${Math.round(sum("draft") / 1000)} ms, target ${Math.round(sum("verify") / 1000)} ms.`;
}
