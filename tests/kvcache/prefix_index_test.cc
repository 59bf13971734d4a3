#include "kvcache/prefix_index.h"

#include <gtest/gtest.h>

#include <numeric>

namespace cachalot::kvcache {
namespace {

constexpr int64_t kPage = 4;

std::vector<int32_t> tokens(int64_t count, int32_t first = 1) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

class PrefixIndexTest : public testing::Test {
 protected:
  static ops::Memory& memory() { return **ops::backend_memory(ops::Backend::kRef); }

  PageRef page() { return std::move(*pages_.take()); }

  // Keeps all whole pages of `ids` and, if asked for, the state at its end.
  bool keep(PrefixIndex& index,
            const std::vector<int32_t>& ids,
            bool with_state,
            int64_t decoder_from = 0,
            double now = 0,
            int64_t draft_from = 0) {
    PrefixKey key = index.root();
    const std::span<const int32_t> all(ids);
    size_t begin = 0;
    std::vector<PageRef> used;
    for (; begin + kPage <= ids.size(); begin += kPage) {
      const PageRef* const kept = index.keep_page(key, all.subspan(begin, kPage), page());
      if (kept == nullptr) {
        return false;
      }
      used.push_back(kept->for_use());
      key = key.then(all.subspan(begin, kPage));
    }
    return !with_state || index.keep_state({.parent = key,
                                            .words = all.subspan(begin),
                                            .position = static_cast<int64_t>(ids.size()),
                                            .decoder_from = decoder_from,
                                            .draft_from = draft_from,
                                            .state = std::move(*states_.take()),
                                            .tail = begin < ids.size() ? page() : PageRef()},
                                           now);
  }

  static PrefixIndex::Match find(PrefixIndex& index,
                                 const std::vector<int32_t>& ids,
                                 double now = 0) {
    return index.find({.tokens = ids}, [](int64_t, int64_t) { return true; }, now);
  }

  PagePool pages_{memory(), 64, 100};
  PagePool states_{memory(), 64, 100};
  PrefixIndex index_{{.page_tokens = kPage, .max_states = 10, .state_ttl = 100}};
};

TEST_F(PrefixIndexTest, FindsTheLongestPrefixWithAState) {
  ASSERT_TRUE(keep(index_, tokens(4), true));
  ASSERT_TRUE(keep(index_, tokens(10), true));
  ASSERT_TRUE(keep(index_, tokens(13), false));
  for (const auto& [length, pages, position] :
       {std::tuple(3, 0u, -1), {4, 1u, 4}, {9, 2u, 4}, {10, 2u, 10}, {11, 2u, 10}, {20, 3u, 10}}) {
    const PrefixIndex::Match match = find(index_, tokens(length));
    EXPECT_EQ(match.pages.size(), pages) << length;
    EXPECT_EQ(match.state.has_value() ? match.state->position : -1, position) << length;
    EXPECT_EQ(match.state.has_value() && match.state->tail, position == 10) << length;
  }
  std::vector<int32_t> other = tokens(12);
  other[9] = 77;
  EXPECT_EQ(find(index_, other).state->position, 4);
  other[0] = 77;
  EXPECT_TRUE(find(index_, other).pages.empty());
}

TEST_F(PrefixIndexTest, TheCallerChoosesAmongStates) {
  ASSERT_TRUE(keep(index_, tokens(6), true, 0));
  ASSERT_TRUE(keep(index_, tokens(8), true, 8));
  const auto complete = [](int64_t, int64_t decoder_from) { return decoder_from == 0; };
  EXPECT_EQ(index_.find({.tokens = tokens(9)}, complete, 0).state->position, 6);
  EXPECT_EQ(find(index_, tokens(9)).state->position, 8);
  // A state with more rows replaces one of the same position with fewer.
  ASSERT_TRUE(keep(index_, tokens(8), true, 0));
  EXPECT_EQ(index_.find({.tokens = tokens(9)}, complete, 0).state->position, 8);
  EXPECT_EQ(index_.state_count(), 2);
}

// Rows of the drafter are worth a replacement, but not for rows of the decoder.
TEST_F(PrefixIndexTest, StatesWithMoreDrafterRowsReplaceOthers) {
  const auto draft_from = [&] { return find(index_, tokens(9)).state->draft_from; };
  ASSERT_TRUE(keep(index_, tokens(8), true, 2, 0, 8));
  EXPECT_EQ(draft_from(), 8);
  ASSERT_TRUE(keep(index_, tokens(8), true, 3, 0, 0));
  EXPECT_EQ(draft_from(), 8);
  ASSERT_TRUE(keep(index_, tokens(8), true, 2, 0, 5));
  EXPECT_EQ(draft_from(), 5);
  ASSERT_TRUE(keep(index_, tokens(8), true, 0, 0, 7));
  EXPECT_EQ(draft_from(), 7);
  EXPECT_EQ(find(index_, tokens(9)).state->decoder_from, 0);
}

// what another model computed is not found.
TEST_F(PrefixIndexTest, A27_AnotherModelFindsNothing) {
  ASSERT_TRUE(keep(index_, tokens(8), true));
  PrefixIndex other({.page_tokens = kPage,
                     .max_states = 10,
                     .state_ttl = 100,
                     .root = PrefixKey().then(std::string_view("other weights"))});
  EXPECT_NE(other.root(), index_.root());
  EXPECT_NE(other.root().then(tokens(4)), index_.root().then(tokens(4)));
}

TEST_F(PrefixIndexTest, KeysDependOnTheWholePrefix) {
  const PrefixKey root;
  EXPECT_EQ(root.then(tokens(4)).then(tokens(4)), root.then(tokens(4)).then(tokens(4)));
  EXPECT_NE(root.then(tokens(4)).then(tokens(4)), root.then(tokens(4, 2)).then(tokens(4)));
  EXPECT_NE(root.then(tokens(8)), root.then(tokens(4)).then(tokens(4, 5)));
}

TEST_F(PrefixIndexTest, TheFirstPageOfAContentStays) {
  const PageRef first = page(), second = page();
  EXPECT_TRUE(index_.keep_page(index_.root(), tokens(4), first)->same_page(first));
  EXPECT_TRUE(index_.keep_page(index_.root(), tokens(4), second)->same_page(first));
  EXPECT_EQ(index_.page_count(), 1);
}

TEST_F(PrefixIndexTest, PagesBehindAMissingOneAreNotKept) {
  const PrefixKey missing = index_.root().then(tokens(4));
  EXPECT_EQ(index_.keep_page(missing, tokens(4, 5), page()), nullptr);
  EXPECT_FALSE(index_.keep_state({.parent = missing, .state = std::move(*states_.take())}, 0));
  EXPECT_EQ(pages_.pages_cached() + states_.pages_cached(), 0);
}

// The least recently used goes first, leaves before what they stand on, and never what a user
// holds.
TEST_F(PrefixIndexTest, EvictsTheLeastRecentlyUsedThatNobodyHolds) {
  ASSERT_TRUE(keep(index_, tokens(8), false));
  ASSERT_TRUE(keep(index_, tokens(8, 50), false));
  find(index_, tokens(8));
  PrefixIndex::Match held = find(index_, tokens(4, 50));
  EXPECT_EQ(pages_.pages_cached(), 3);
  // The second page of the other prefix; its first is held.
  ASSERT_TRUE(index_.evict());
  EXPECT_EQ(find(index_, tokens(8, 50)).pages.size(), 1u);
  EXPECT_EQ(find(index_, tokens(8)).pages.size(), 2u);
  ASSERT_TRUE(index_.evict());
  EXPECT_EQ(find(index_, tokens(8)).pages.size(), 1u);
  ASSERT_TRUE(index_.evict());
  EXPECT_FALSE(index_.evict());
  EXPECT_EQ(pages_.pages_in_use(), 1);
  held = {};
  ASSERT_TRUE(index_.evict());
  EXPECT_EQ(index_.page_count(), 0);
  EXPECT_EQ(pages_.pages_free(), 100);
}

TEST_F(PrefixIndexTest, PagesUnderAStateStayUntilItGoes) {
  ASSERT_TRUE(keep(index_, tokens(6), true));
  ASSERT_TRUE(index_.evict());
  EXPECT_EQ(index_.state_count(), 0);
  EXPECT_EQ(index_.page_count(), 1);
  EXPECT_EQ(pages_.pages_cached(), 1);
  ASSERT_TRUE(index_.evict());
  EXPECT_EQ(index_.evictions(), 2u);
}

TEST_F(PrefixIndexTest, StatesAreBoundedAndExpire) {
  PrefixIndex index({.page_tokens = kPage, .max_states = 2, .state_ttl = 100});
  ASSERT_TRUE(keep(index, tokens(5), true, 0, 1));
  ASSERT_TRUE(keep(index, tokens(6), true, 0, 2));
  EXPECT_EQ(find(index, tokens(5), 50).state->position, 5);  // used: it stays
  ASSERT_TRUE(keep(index, tokens(7), true, 0, 60));
  EXPECT_EQ(index.state_count(), 2);
  EXPECT_EQ(find(index, tokens(6), 60).state->position, 5);
  EXPECT_EQ(find(index, tokens(7), 159.5).state->position, 7);
  EXPECT_EQ(index.state_count(), 2);
  EXPECT_FALSE(find(index, tokens(5), 161).state.has_value());
  EXPECT_EQ(index.state_count(), 1);
  index.clear();
  EXPECT_EQ(pages_.pages_free(), 100);
  EXPECT_EQ(states_.pages_free(), 100);
}

// Random operations against the obvious definition.
TEST_F(PrefixIndexTest, CountsStayConsistentUnderRandomUse) {
  uint64_t random = 1;
  const auto draw = [&](uint64_t below) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return (random >> 33) % below;
  };
  std::vector<PrefixIndex::Match> held;
  for (int i = 0; i < 3000; ++i) {
    std::vector<int32_t> ids;
    for (uint64_t n = 1 + draw(20); n > 0; --n) {
      ids.push_back(static_cast<int32_t>(draw(2)));
    }
    switch (draw(4)) {
      case 0:
        if (pages_.pages_free() > 10) {
          keep(index_, ids, draw(2) == 0, 0, i);
        }
        break;
      case 1:
        held.push_back(find(index_, ids, i));
        break;
      case 2:
        index_.evict();
        break;
      default:
        if (!held.empty()) {
          held.erase(held.begin() + static_cast<int64_t>(draw(held.size())));
        }
    }
    EXPECT_LE(index_.state_count(), 10);
  }
  held.clear();
  EXPECT_EQ(pages_.pages_in_use(), 0);
  while (index_.evict()) {
  }
  EXPECT_EQ(pages_.pages_free(), 100);
  EXPECT_EQ(states_.pages_free(), 100);
}

// prompts that differ in an image alone share what stands before it, and nothing behind.
TEST_F(PrefixIndexTest, A26_ImagesTellPrefixesApart) {
  // Two pages of text, six slots of an image from position 7 on, text again. All slots have one id.
  std::vector<int32_t> ids = tokens(17);
  std::fill(ids.begin() + 7, ids.begin() + 13, 99);
  const auto image = [](uint8_t mark) { return ImageSpan{7, 13, {mark}}; };
  const std::vector<ImageSpan> a = {image(1)}, b = {image(2)}, none;
  const auto keep = [&](const std::vector<ImageSpan>& images, int64_t length) {
    const PrefixContent content{ids, images};
    PrefixKey key = index_.root();
    std::vector<PageRef> used;
    int64_t at = 0;
    for (; at + kPage <= length; at += kPage) {
      const std::vector<int32_t> words = content.words(at, at + kPage);
      used.push_back(index_.keep_page(key, words, page())->for_use());
      key = key.then(words);
    }
    EXPECT_TRUE(index_.keep_state({.parent = key,
                                   .words = content.words(at, length),
                                   .position = length,
                                   .state = std::move(*states_.take()),
                                   .tail = at < length ? page() : PageRef()},
                                  0));
  };
  const auto found = [&](const std::vector<ImageSpan>& images) {
    const PrefixIndex::Match match =
        index_.find({ids, images}, [](int64_t, int64_t) { return true; }, 0);
    return std::pair(match.pages.size(), match.state.has_value() ? match.state->position : 0);
  };
  using Found = std::pair<size_t, int64_t>;
  keep(a, 16);
  EXPECT_EQ(found(a), Found(4, 16));
  // The second page ends with the first slot.
  EXPECT_EQ(found(b), Found(1, 0));
  EXPECT_EQ(found(none), Found(1, 0));
  // States in the middle of the image, one of them at a page's end, and one right before it.
  keep(a, 8);
  keep(a, 10);
  keep(a, 7);
  EXPECT_EQ(found(b), Found(1, 7));
  EXPECT_EQ(found(none), Found(1, 7));
  keep(b, 10);
  EXPECT_EQ(found(b), Found(2, 10));
  EXPECT_EQ(found(a), Found(4, 16));
  // The same image elsewhere, and a second one in the same page.
  EXPECT_EQ(found({{6, 12, {1}}}), Found(1, 0));
  EXPECT_EQ(found({{7, 13, {1}}, {13, 17, {1}}}), Found(3, 10));
  EXPECT_EQ(found(a), Found(4, 16));
}

}  // namespace
}  // namespace cachalot::kvcache
