// What needs a token: asks for one where there is none, does the thing, and says how it went.

import { Refusal } from "./api.js";
import { byId, say } from "./elements.js";

export class Operating {
  #api;
  #role = null;
  #refresh;
  #telling;

  /**
   * @param {Api} api
   * @param refresh shows what is so after something was done, or after the token changed
   */
  constructor(api, refresh) {
    this.#api = api;
    this.#refresh = refresh;
    byId("token-open").addEventListener("click", () => this.ask(""));
    byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
    byId("token-forget").addEventListener("click", () => {
      api.forgetToken();
      this.role = null;
      byId("token-dialog").close();
      this.tell("The token is forgotten.");
      refresh();
    });
    byId("token-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#use(byId("token").value.trim());
    });
  }

  /** Show what is so now: something else is to be shown, or was done. */
  refresh() {
    this.#refresh();
  }

  /** What who looks may do, as the status says. */
  set role(role) {
    this.#role = role;
    say(
      byId("token-open"),
      role === "operate" ? "Role: operate" : this.#api.hasToken ? "Role: read" : "Token…",
    );
  }

  /** Do something that needs a token of role operate. What it returns is told; null: nothing is. */
  async run(doing, act) {
    if (this.#role !== "operate") {
      this.ask(`${doing} needs a token of role operate.`);
      return;
    }
    try {
      const told = await act();
      if (told !== null) this.tell(told);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (error.wantsToken) this.ask(`${doing} was refused: ${error.message}.`);
      else this.tell(`${doing} failed: ${error.message}.`, true);
    }
    this.#refresh();
  }

  /** Ask for a token, and say why. */
  ask(why) {
    const dialog = byId("token-dialog");
    say(byId("token-why"), why);
    say(byId("token-problem"), "");
    byId("token-forget").hidden = !this.#api.hasToken;
    byId("token").value = "";
    if (!dialog.open) dialog.showModal();
    byId("token").focus();
  }

  /** Say something at the foot of the page. */
  tell(words, isProblem = false) {
    const notice = byId("notice");
    notice.hidden = false;
    notice.classList.toggle("bad", isProblem);
    say(notice, words);
    clearTimeout(this.#telling);
    this.#telling = setTimeout(
      () => {
        notice.hidden = true;
      },
      isProblem ? 20_000 : 8000,
    );
  }

  async #use(token) {
    const problem = byId("token-problem");
    if (token === "") {
      say(problem, "No token was given.");
      return;
    }
    try {
      const role = await this.#api.tryToken(token);
      this.role = role;
      byId("token").value = "";
      byId("token-dialog").close();
      this.tell(
        role === "operate" ? "The token may look and change." : "The token may look, and change nothing.",
      );
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      say(
        problem,
        error.wantsToken ? "This token is none that is known." : `It could not be tried: ${error.message}.`,
      );
    }
    this.#refresh();
  }
}
