// Makes this page dark when the page around it is: TensorBoard's body has the class `dark-mode`, ours have `dark`.
// A page on its own, or in a page of strangers, is as the browser wants it.
(() => {
  "use strict";
  const own = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");

  function pageAround() {
    try {
      return parent === window ? null : parent.document;
    } catch {
      return null; // a page of strangers
    }
  }

  const around = pageAround();
  function follow() {
    const dark = around
      ? around.documentElement.classList.contains("dark") || around.body.classList.contains("dark-mode")
      : preferred.matches;
    if (dark === own.classList.contains("dark")) return;
    own.classList.toggle("dark", dark);
    window.dispatchEvent(new Event("look"));
  }

  follow();
  preferred.addEventListener("change", follow);
  for (const element of around ? [around.documentElement, around.body] : []) {
    new MutationObserver(follow).observe(element, { attributeFilter: ["class"] });
  }
})();
