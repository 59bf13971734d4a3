#include "train/evaluation.h"

#include <algorithm>
#include <numbers>

#include "model/forward.h"
#include "train/lanes.h"

namespace cachalot::train {
namespace {

// Calls run(batches) with about `text.most` tokens of a corpus, a few batches at a time.
template <class Run>
void for_batches(const Corpus& corpus,
                 const EvaluationText& text,
                 ThreadPool& pool,
                 const Run& run) {
  std::vector<Batch> batches;
  int64_t seen = 0;
  for (const std::vector<Piece>& pieces :
       plan_epoch(corpus, 0, 0, text.sequence, text.micro_tokens)) {
    if (seen >= text.most) {
      break;
    }
    batches.push_back(make_batch(corpus, pieces));
    seen += batches.back().rows();
    if (static_cast<int64_t>(batches.size()) == pool.threads()) {
      run(batches);
      batches.clear();
    }
  }
  run(batches);
}

}  // namespace

double Evaluation::bits_per_byte() const {
  return nats / std::numbers::ln2 / static_cast<double>(bytes);
}

Evaluation evaluate(ParameterSet<float>& parameters,
                    ForwardOptions options,
                    const Corpus& corpus,
                    const text::Tokenizer& tokenizer,
                    const EvaluationText& text,
                    ThreadPool& pool) {
  options.gradients = false;
  options.indexer.coefficient = 0;
  options.keep_logits = true;
  Evaluation result;
  Lanes lanes(parameters, pool);
  for_batches(corpus, text, pool, [&](const std::vector<Batch>& batches) {
    lanes.run(
        batches,
        [&](const Batch&) { return options; },
        [&](TrainExec<float>& exec) { model::forward(exec, parameters.model()); },
        [&](const Batch& batch, const TrainExec<float>& exec) {
          result.nats += exec.report().loss_sum;
          const int64_t vocab = exec.logits().width();
          for (int64_t row = 0; row < batch.rows(); ++row) {
            const int32_t target = batch.target[static_cast<size_t>(row)];
            if (target >= 0) {
              const float* logits = exec.logits().value() + row * vocab;
              result.right += std::max_element(logits, logits + vocab) == logits + target ? 1 : 0;
              ++result.targets;
              result.bytes += tokenizer.is_control(target)
                                  ? 0
                                  : static_cast<int64_t>(tokenizer.token_bytes(target).size());
            }
          }
        });
  });
  return result;
}

DraftEvaluation evaluate_drafter(ParameterSet<float>& parameters,
                                 ForwardOptions options,
                                 const Corpus& corpus,
                                 const EvaluationText& text,
                                 ThreadPool& pool) {
  options.gradients = false;
  options.indexer.coefficient = 0;
  const model::ModelConfig& config = parameters.model().config;
  const auto block = static_cast<size_t>(config.dspark_block_size);
  DraftEvaluation result;
  double weight = 0;
  Lanes lanes(parameters, pool);
  for_batches(corpus, text, pool, [&](const std::vector<Batch>& batches) {
    std::vector<DraftBlocks> blocks;
    for (const Batch& batch : batches) {
      blocks.push_back(make_draft_blocks(config, options.draft, batch, 0));
      weight += blocks.back().weight_sum;
    }
    lanes.run(
        batches,
        [&](const Batch& batch) {
          ForwardOptions own = options;
          own.blocks = &blocks[static_cast<size_t>(&batch - batches.data())];
          return own;
        },
        [&](TrainExec<float>& exec) { train_drafter(exec, parameters.model()); },
        [&](const Batch&, const TrainExec<float>& exec) {
          result.loss += exec.report().loss_sum;
          // Counted rows come in order: those of a whole block follow each other.
          const std::vector<DraftRow>& rows = exec.report().draft;
          for (size_t i = 0; i + block <= rows.size(); ++i) {
            const auto first = static_cast<size_t>(rows[i].row);
            if (first % block != 0 ||
                rows[i + block - 1].row != rows[i].row + static_cast<int64_t>(block) - 1) {
              continue;
            }
            DraftSample& sample = result.samples.emplace_back();
            for (size_t k = i; k < i + block; ++k) {
              sample.confidence.push_back(rows[k].confidence);
              sample.acceptance.push_back(rows[k].acceptance);
            }
          }
        });
  });
  result.loss /= weight;
  result.acceptance.assign(block, 0.0);
  for (const DraftSample& sample : result.samples) {
    double survives = 1;
    result.length += 1;
    for (size_t k = 0; k < block; ++k) {
      survives *= sample.acceptance[k];
      result.acceptance[k] += sample.acceptance[k];
      result.length += survives;
    }
  }
  const auto n = static_cast<double>(result.samples.size());
  result.length /= n;
  for (double& acceptance : result.acceptance) {
    acceptance /= n;
  }
  return result;
}

}  // namespace cachalot::train
