/* What UCX alone makes of a pull: one process exposes COUNT x SIZE bytes, another reads them with one
 * ucp_get_nbx a block in a scattered order, then waits for all.  Prints one line a round: post_us xfer_us.
 *
 *   cc -O2 raw_ucp.c -o raw_ucp -I/usr/include -L... -lucp -lucs && UCX_TLS=tcp ./raw_ucp COUNT SIZE ROUNDS
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>
#include <ucp/api/ucp.h>

static void must(ucs_status_t s, const char *what) {
    if (s != UCS_OK) { fprintf(stderr, "%s: %s\n", what, ucs_status_string(s)); exit(1); }
}
static void put(int fd, const void *p, size_t n) { if (write(fd, p, n) != (ssize_t)n) exit(2); }
static void get(int fd, void *p, size_t n) {
    for (char *c = p; n;) { ssize_t k = read(fd, c, n); if (k <= 0) exit(3); c += k; n -= (size_t)k; }
}
static double now_us(void) {
    struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
static ucp_context_h context; static ucp_worker_h worker;
static void open_ucp(void) {
    ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                      .features = UCP_FEATURE_RMA, .mt_workers_shared = 0};
    must(ucp_init(&p, NULL, &context), "ucp_init");
    ucp_worker_params_t w = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    must(ucp_worker_create(context, &w, &worker), "ucp_worker_create");
}
static ucp_mem_h map(void *base, size_t size) {
    ucp_mem_map_params_t p = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                              .address = base, .length = size};
    ucp_mem_h h; must(ucp_mem_map(context, &p, &h), "ucp_mem_map"); return h;
}
static void target(int fd, size_t size) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    open_ucp();
    char *pool = malloc(size); memset(pool, 7, size);
    ucp_mem_h memory = map(pool, size);
    void *key; size_t key_size; must(ucp_rkey_pack(context, memory, &key, &key_size), "ucp_rkey_pack");
    ucp_address_t *address; size_t address_size;
    must(ucp_worker_get_address(worker, &address, &address_size), "ucp_worker_get_address");
    put(fd, &address_size, sizeof address_size); put(fd, address, address_size);
    put(fd, &key_size, sizeof key_size); put(fd, key, key_size); put(fd, &pool, sizeof pool);
    for (long n = 1;; n++) {
        ucp_worker_progress(worker);
        if (n % 256 == 0) { struct pollfd p = {.fd = fd, .events = POLLIN}; if (poll(&p, 1, 0)) exit(0); }
    }
}
int main(int argc, char **argv) {
    if (argc != 4) { fprintf(stderr, "usage: raw_ucp COUNT SIZE ROUNDS\n"); return 2; }
    size_t count = strtoul(argv[1], 0, 10), size = strtoul(argv[2], 0, 10); int rounds = atoi(argv[3]);
    int fd[2]; if (socketpair(AF_UNIX, SOCK_STREAM, 0, fd)) return 1;
    pid_t child = fork();
    if (!child) { close(fd[0]); target(fd[1], count * size); }
    close(fd[1]); open_ucp();
    char *pool = malloc(count * size); memset(pool, 1, count * size); map(pool, count * size);
    size_t n; get(fd[0], &n, sizeof n); ucp_address_t *address = malloc(n); get(fd[0], address, n);
    get(fd[0], &n, sizeof n); void *key = malloc(n); get(fd[0], key, n);
    char *remote; get(fd[0], &remote, sizeof remote);
    ucp_ep_params_t e = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
    ucp_ep_h ep; must(ucp_ep_create(worker, &e, &ep), "ucp_ep_create");
    ucp_rkey_h rkey; must(ucp_ep_rkey_unpack(ep, key, &rkey), "ucp_ep_rkey_unpack");
    size_t *order = malloc(count * sizeof *order); void **requests = malloc(count * sizeof *requests);
    for (size_t i = 0; i < count; i++) order[i] = i;
    srand(1);
    for (int r = 0; r < rounds; r++) {
        for (size_t i = count - 1; i; i--) { size_t j = rand() % (i + 1), t = order[i]; order[i] = order[j]; order[j] = t; }
        ucp_request_param_t none = {0}; size_t pending = 0;
        double t = now_us();
        for (size_t i = 0; i < count; i++) {
            void *q = ucp_get_nbx(ep, pool + i * size, size, (uint64_t)(remote + order[i] * size), rkey, &none);
            if (UCS_PTR_IS_ERR(q)) must(UCS_PTR_STATUS(q), "ucp_get_nbx");
            if (q) requests[pending++] = q;
        }
        double posted = now_us();
        for (size_t i = 0; i < pending; i++) {
            while (ucp_request_check_status(requests[i]) == UCS_INPROGRESS) ucp_worker_progress(worker);
            must(ucp_request_check_status(requests[i]), "read"); ucp_request_free(requests[i]);
        }
        printf("%.1f %.1f\n", posted - t, now_us() - t); fflush(stdout);
    }
    close(fd[0]); kill(child, SIGKILL); waitpid(child, NULL, 0);
    _exit(pool[count * size - 1] == 7 ? 0 : 4);  /* UCX's modules are torn down in no safe order without a full clean-up */
}
