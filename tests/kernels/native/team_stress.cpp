// Regions of all sizes from several callers, with parts that lose their core: every part runs once, and its caller sees
// what it wrote.
// Built with a thread sanitizer by test_team.py.  team_stress SECONDS
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

using Clock = std::chrono::steady_clock;

static long regions(unsigned seed, Clock::time_point until) {
  std::mt19937 random(seed);
  std::vector<int> counts;
  long done = 0;
  for (; Clock::now() < until; done++) {
    const long shares = 1 + random() % 5, parts = 1 + random() % (random() % 8 == 0 ? 400 : 6);
    const unsigned late = random() % 16 == 0 ? 1 + random() % (shares * parts) : 0;
    counts.assign(shares * parts, 0);
    loraplex::in_shares(shares, parts, [&](long share, long part) {
      const long i = share * parts + part;
      if (i + 1 == late) std::this_thread::sleep_for(std::chrono::microseconds(300));
      else if (i % 7 == 0) sched_yield();
      counts[i] += share == shares - 1 ? 2 : 1;
    });
    for (long i = 0; i < shares * parts; i++)
      if (counts[i] != (i / parts == shares - 1 ? 2 : 1)) {
        fprintf(stderr, "part %ld of %ld x %ld: %d\n", i, shares, parts, counts[i]);
        _exit(1);
      }
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(250));  // its threads fall asleep
  }
  return done;
}

int main(int, char** argv) {
  const auto until = Clock::now() + std::chrono::milliseconds(long(1e3 * atof(argv[1])));
  long other = 0;
  std::thread caller([&] { other = regions(1, until); });
  const long own = regions(2, until);
  caller.join();
  printf("%ld regions\n", own + other);
  fflush(stdout);
  const pid_t child = fork();  // which has none of the threads
  if (child == 0) {
    regions(3, Clock::now() + std::chrono::milliseconds(100));
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}
