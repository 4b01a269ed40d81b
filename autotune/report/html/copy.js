/* Copies the text of another element; where the clipboard is refused, it is selected instead. */
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", async () => {
  const source = document.getElementById(button.dataset.copies), all = document.createRange();
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    all.selectNodeContents(source);
    getSelection().removeAllRanges();
    getSelection().addRange(all);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});
