test_that("a training from R lowers its loss", {
  need_python()
  optimizer <- optimizer_loss_scale(keras()$optimizers$Adam(0.05), 2^20, 20)
  weights <- list(variable(c(0, 0, 0)))
  inputs <- lapply(1:8, function(i) c(1, i / 8, (i %% 3) / 3))
  targets <- lapply(inputs, function(input) sum(input * c(1, -2, 3)))
  layer <- keras()$layers$Dense(1L)
  model <- keras()$Sequential(list(keras()$Input(list(3L)), layer))
  model$compile(optimizer = optimizer, loss = "mse")
  history <- model$fit(
    keras()$ops$convert_to_tensor(inputs), keras()$ops$convert_to_tensor(lapply(targets, list)),
    epochs = 30L, batch_size = 4L, verbose = 0L
  )
  loss <- history$history$loss
  expect_lt(tail(loss, 1L), loss[[1L]] / 4)
  expect_identical(numbers(optimizer$iterations), 60L)
  expect_identical(optimizer$loss_scale, 2^23)
})
