# Beside the tests in the source tree; under R CMD check, in the copy that it unpacked.
readme <- function() {
  places <- test_path(c("../../README.md", "../../00_pkg_src/preamp/README.md"))
  readLines(Filter(file.exists, places)[[1L]])
}

blocks <- function(lines, language) {
  starts <- which(lines == paste0("```", language))
  ends <- vapply(starts, function(start) start + which(lines[-seq_len(start)] == "```")[[1L]], 0)
  Map(function(start, end) lines[(start + 1):(end - 1)], starts, ends)
}

words <- function(lines) trimws(gsub(NUMBER, "#", lines))
digits <- function(lines) as.numeric(unlist(regmatches(lines, gregexpr(NUMBER, lines))))
NUMBER <- "[0-9.]+"

test_that("the README's R code runs and does what it says", {
  need_python()
  on.exit(keras()$config$set_dtype_policy("float32"))
  here <- new.env(parent = globalenv())
  code <- blocks(readme(), "r")
  output <- capture.output(eval(parse(text = code[[1L]]), here))
  expect_lt(here$loss[[20L]], here$loss[[1L]] / 10)
  expect_gt(here$optimizer$skipped_steps, 0L)
  expect_lt(here$optimizer$loss_scale, 2^24)
  expect_gt(cor(here$predicted, here$y), 0.9)
  if (backend() == "torch") {
    printed <- blocks(readme(), "text")[[1L]]
    expect_identical(words(output), words(printed))
    expect_lt(max(abs(digits(output) / digits(printed) - 1)), 0.02)
  }
  for (block in code[-1L]) eval(parse(text = block), here)
  expect_identical(here$optimizer$loss_scale, 2^12)
})

test_that("the README's to_numpy() keeps the rows and columns of a matrix", {
  need_python()
  here <- new.env(parent = globalenv())
  code <- parse(text = blocks(readme(), "r")[[1L]])
  name <- vapply(code, function(line) deparse(line[[2L]])[[1L]], "")
  for (line in code[name %in% c("reticulate", "to_numpy")]) eval(line, here)
  x <- matrix(c(1, -2, 0.5, 3, 1e-3, 7), 2)
  rows <- reticulate::py_to_r(here$to_numpy(x)$tolist())
  expect_equal(rows, list(x[1, ], x[2, ]), tolerance = 1e-6)
})
