// Makes this page dark if the page around it is dark: TensorBoard's body has the class `dark-mode`, ours have `dark`.
(() => {
  "use strict";
  const own = document.documentElement;
  const around = [parent.document.documentElement, parent.document.body].filter(Boolean);

  function follow() {
    const dark = around.some((element) => element.matches(".dark, .dark-mode"));
    if (dark === own.classList.contains("dark")) return;
    own.classList.toggle("dark", dark);
    window.dispatchEvent(new Event("look"));
  }

  follow();
  for (const element of around) new MutationObserver(follow).observe(element, { attributeFilter: ["class"] });
})();
