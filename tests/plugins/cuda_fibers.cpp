// Runs the CUDA sources themselves on a CPU: every CUDA thread is a fiber, every barrier and warp intrinsic a point
// where the scheduler picks the next fiber at random. So the CUDA half of block.cuh and the entry points are tested
// where there is no GPU: results, barriers that not all threads reach (a deadlock here), and writes whose order is
// left to chance. It says nothing of speed, of memory ordering or of what a compiler for GPUs does.
//
// Built by test_cuda_source.py, which replaces the dynamic shared memory of entry.cu by the array below.
#define __CUDACC__ 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

struct Index {
  unsigned x;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {

constexpr std::size_t kStack = 64 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread;
};

struct Barrier {
  std::size_t threads = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  Barrier barrier;
  std::uint64_t values[32];
};

static ucontext_t scheduler;
static Fiber* current;
static std::vector<Fiber*> runnable;
static Barrier block_barrier;
static std::vector<Warp> warps;
static void (*body)();

static void wait(Barrier& barrier) {
  barrier.waiting.push_back(current);
  if (barrier.waiting.size() == barrier.threads) {
    runnable.insert(runnable.end(), barrier.waiting.begin(), barrier.waiting.end());
    barrier.waiting.clear();
  }
  swapcontext(&current->context, &scheduler);
}

// Runs one block to its end; false if some threads wait at a barrier that the others never reach.
static bool run_block(unsigned threads, std::mt19937_64& random) {
  std::vector<Fiber> all(threads);
  block_barrier = {threads, {}};
  warps.assign(threads / 32, Warp{});
  for (Warp& warp : warps) warp.barrier.threads = 32;
  runnable.clear();
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = all[t];
    fiber.thread = t;
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, body, 0);
    runnable.push_back(&fiber);
  }
  // Half of the blocks take any runnable thread; the others mostly go on with the warp that ran last, so that it gets
  // as far ahead of the others as barriers allow.
  const unsigned stay = random() % 2 ? 1 : 256;
  while (!runnable.empty()) {
    if (random() % stay == 0) std::swap(runnable[random() % runnable.size()], runnable.back());
    current = runnable.back();
    runnable.pop_back();
    threadIdx.x = current->thread;
    swapcontext(&scheduler, &current->context);
  }
  bool stuck = !block_barrier.waiting.empty();
  for (const Warp& warp : warps) stuck = stuck || !warp.barrier.waiting.empty();
  return !stuck;
}

// Every lane of the warp passes a value and gets pick(lane, values of all lanes).
template <class T, class Pick>
auto exchange(T mine, Pick pick) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned lane = current->thread % 32;
  Warp& warp = warps[current->thread / 32];
  std::memcpy(&warp.values[lane], &mine, sizeof mine);
  wait(warp.barrier);
  const auto picked = pick(lane, [&](unsigned from) {
    T theirs;
    std::memcpy(&theirs, &warp.values[from], sizeof theirs);
    return theirs;
  });
  wait(warp.barrier);
  return picked;
}

}  // namespace fibers

static void __syncthreads() { fibers::wait(fibers::block_barrier); }

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return fibers::exchange(value, [&](unsigned, auto of) { return of(static_cast<unsigned>(from) % 32); });
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  return fibers::exchange(value, [&](unsigned lane, auto of) { return of(lane < delta ? lane : lane - delta); });
}

static unsigned __ballot_sync(unsigned, bool chosen) {
  return fibers::exchange(chosen, [](unsigned, auto of) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(of(lane)) << lane;
    return ballot;
  });
}

static int __popc(unsigned word) { return __builtin_popcount(word); }

static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }
static int atomicMin(int* at, int value) { return std::exchange(*at, value < *at ? value : *at); }
static int atomicCAS(int* at, int expected, int desired) {
  return std::exchange(*at, *at == expected ? desired : *at);
}

int shared_words[227 * 1024 / 4];

#include "entry.cu"

namespace {

template <class... A, std::size_t... I>
bool launch_as(void (*kernel)(A...), std::index_sequence<I...>, unsigned grid, unsigned block, std::uint64_t seed,
               void** arguments) {
  static std::tuple<void (*)(A...), A...> call;
  call = {kernel, *static_cast<A*>(arguments[I])...};
  fibers::body = [] {
    std::apply([](auto function, auto... values) { function(values...); }, call);
  };
  std::mt19937_64 random(seed);
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    if (!fibers::run_block(block, random)) return false;
  }
  return true;
}

template <class... A>
bool launch_as(void (*kernel)(A...), unsigned grid, unsigned block, std::uint64_t seed, void** arguments) {
  return launch_as(kernel, std::index_sequence_for<A...>{}, grid, block, seed, arguments);
}

}  // namespace

// As cuLaunchKernel: `arguments` points at the kernel's arguments. 0: done, 1: deadlock, 2: no such kernel.
extern "C" int launch(const char* name, unsigned grid, unsigned block, std::uint64_t seed, void** arguments) {
  const std::string kernel = name;
  bool done;
  if (kernel == "dhs_resolve") {
    done = launch_as(dhs_resolve, grid, block, seed, arguments);
  } else if (kernel == "dhs_adopt") {
    done = launch_as(dhs_adopt, grid, block, seed, arguments);
  } else if (kernel == "dhs_locate") {
    done = launch_as(dhs_locate, grid, block, seed, arguments);
  } else if (kernel == "dhs_topk") {
    done = launch_as(dhs_topk, grid, block, seed, arguments);
  } else if (kernel == "dhs_fetch_rows") {
    done = launch_as(dhs_fetch_rows, grid, block, seed, arguments);
  } else if (kernel == "dhs_copy_pages") {
    done = launch_as(dhs_copy_pages, grid, block, seed, arguments);
  } else {
    return 2;
  }
  return done ? 0 : 1;
}
