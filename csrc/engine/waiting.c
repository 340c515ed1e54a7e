#include "engine/waiting.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct seq_array {
    struct qkv_seq **seqs; /* [n], with NULL where one was removed; seqs[i]->slot == i */
    size_t n;
    size_t capacity;
    size_t n_there; /* not NULL */
};

struct qkv_waiting {
    bool sorted;
    struct qkv_seq *front; /* list: the retracted ones; unless sorted, then all by submission */
    struct qkv_seq *back;
    int64_t n_listed;
    struct seq_array set; /* being used up */
    size_t set_head;      /* entries before it are NULL */
    struct seq_array arrivals;
};

enum qkv_status qkv_waiting_create(struct qkv_error *err, bool sorted, struct qkv_waiting **out)
{
    void *block = NULL;
    QKV_TRY(qkv_calloc(err, 1, sizeof(struct qkv_waiting), &block));
    struct qkv_waiting *waiting = block;
    waiting->sorted = sorted;
    *out = waiting;
    return QKV_OK;
}

void qkv_waiting_destroy(struct qkv_waiting *waiting)
{
    if (waiting == NULL) {
        return;
    }
    free(waiting->set.seqs);
    free(waiting->arrivals.seqs);
    free(waiting);
}

int64_t qkv_waiting_count(const struct qkv_waiting *waiting)
{
    return waiting->n_listed + (int64_t)(waiting->set.n_there + waiting->arrivals.n_there);
}

enum qkv_status qkv_waiting_add(struct qkv_error *err, struct qkv_waiting *waiting,
                                struct qkv_seq *seq)
{
    if (!waiting->sorted) {
        seq->slot = -1;
        seq->prev = waiting->back;
        seq->next = NULL;
        if (waiting->back == NULL) {
            waiting->front = seq;
        } else {
            waiting->back->next = seq;
        }
        waiting->back = seq;
        waiting->n_listed++;
        return QKV_OK;
    }
    struct seq_array *arrivals = &waiting->arrivals;
    void *block = arrivals->seqs;
    enum qkv_status status =
        qkv_grow(err, &block, &arrivals->capacity, arrivals->n + 1, sizeof(struct qkv_seq *));
    arrivals->seqs = block;
    QKV_TRY(status);
    seq->slot = (int64_t)arrivals->n;
    arrivals->seqs[arrivals->n++] = seq;
    arrivals->n_there++;
    return QKV_OK;
}

void qkv_waiting_add_front(struct qkv_waiting *waiting, struct qkv_seq *seq)
{
    seq->slot = -1;
    seq->prev = NULL;
    seq->next = waiting->front;
    if (waiting->front == NULL) {
        waiting->back = seq;
    } else {
        waiting->front->prev = seq;
    }
    waiting->front = seq;
    waiting->n_listed++;
}

static bool is_in(const struct seq_array *array, const struct qkv_seq *seq)
{
    return seq->slot >= 0 && (size_t)seq->slot < array->n && array->seqs[seq->slot] == seq;
}

void qkv_waiting_remove(struct qkv_waiting *waiting, struct qkv_seq *seq)
{
    if (seq->slot >= 0) {
        struct seq_array *array = is_in(&waiting->set, seq) ? &waiting->set : &waiting->arrivals;
        assert(is_in(array, seq));
        array->seqs[seq->slot] = NULL;
        array->n_there--;
        seq->slot = -1;
        return;
    }
    if (seq->prev == NULL) {
        assert(waiting->front == seq);
        waiting->front = seq->next;
    } else {
        seq->prev->next = seq->next;
    }
    if (seq->next == NULL) {
        assert(waiting->back == seq);
        waiting->back = seq->prev;
    } else {
        seq->next->prev = seq->prev;
    }
    seq->prev = NULL;
    seq->next = NULL;
    waiting->n_listed--;
}

/* Merge sort that knows shared prefixes. Along a sorted run an item holds how many tokens it shares
 * with the item before it, and its token at that place. When two runs are merged, both candidates
 * are compared with the item written last: the one that shares more with it comes first; if they
 * share equally much, the tokens there decide; and only if those are equal, too, are the sequences
 * themselves read, from there on. So a shared prefix is read about once, not once per comparison,
 * and most comparisons touch nothing but the item. */
struct sort_item {
    struct qkv_seq *seq;
    int32_t n_same; /* tokens shared with the item before it */
    int32_t token;  /* tokens[n_same]; -1 at the end: a prefix comes before what continues it */
};

static int32_t token_at(const struct qkv_seq *seq, int32_t at)
{
    return at < seq->n_tokens ? seq->tokens[at] : -1;
}

static int32_t count_same(const struct qkv_seq *a, const struct qkv_seq *b, int32_t from)
{
    int32_t n = a->n_tokens < b->n_tokens ? a->n_tokens : b->n_tokens;
    int32_t at = from;
    while (at < n && a->tokens[at] == b->tokens[at]) {
        at++;
    }
    return at;
}

/* Whether *a comes before or with *b, both compared with the item written last. What is not taken
 * is then compared with what is. */
static bool takes_first(struct sort_item *a, struct sort_item *b)
{
    if (a->n_same != b->n_same) {
        return a->n_same > b->n_same;
    }
    if (a->token == b->token && a->token >= 0) {
        int32_t n_same = count_same(a->seq, b->seq, a->n_same);
        int32_t a_token = token_at(a->seq, n_same);
        int32_t b_token = token_at(b->seq, n_same);
        struct sort_item *later = a_token <= b_token ? b : a;
        later->n_same = n_same;
        later->token = later == b ? b_token : a_token;
        return later == b;
    }
    return a->token <= b->token;
}

/* Stable: items [begin, middle) and [middle, end) of `from` become [begin, end) of `to`. */
static void merge_runs(struct sort_item *from, struct sort_item *to, size_t begin, size_t middle,
                       size_t end)
{
    size_t a = begin;
    size_t b = middle;
    for (size_t i = begin; i < end; i++) {
        if (b == end || (a < middle && takes_first(&from[a], &from[b]))) {
            to[i] = from[a++];
        } else {
            to[i] = from[b++];
        }
    }
}

static enum qkv_status sort_seqs(struct qkv_error *err, struct qkv_seq **seqs /* [n] */, size_t n)
{
    void *block = NULL;
    uint64_t n_items = 0;
    if (!qkv_mul_size(n, 2, &n_items)) {
        return qkv_fail(err, QKV_ERR_MEMORY, "waiting sequences: %zu are too many", n);
    }
    QKV_TRY(qkv_calloc(err, (size_t)n_items, sizeof(struct sort_item), &block));
    struct sort_item *from = block;
    struct sort_item *to = from + n;
    for (size_t i = 0; i < n; i++) {
        from[i] = (struct sort_item){seqs[i], 0, seqs[i]->tokens[0]};
    }
    for (size_t run = 1; run < n; run *= 2) {
        for (size_t begin = 0; begin < n; begin += 2 * run) {
            size_t middle = begin + run < n ? begin + run : n;
            size_t end = middle + run < n ? middle + run : n;
            merge_runs(from, to, begin, middle, end);
        }
        struct sort_item *swap = from;
        from = to;
        to = swap;
    }
    for (size_t i = 0; i < n; i++) {
        seqs[i] = from[i].seq;
        seqs[i]->slot = (int64_t)i;
    }
    free(block);
    return QKV_OK;
}

static void drop_removed(struct seq_array *array)
{
    size_t n = 0;
    for (size_t i = 0; i < array->n; i++) {
        if (array->seqs[i] != NULL) {
            array->seqs[n] = array->seqs[i];
            array->seqs[n]->slot = (int64_t)n;
            n++;
        }
    }
    array->n = n;
}

/* All that have arrived become the set, the used-up one takes the arrivals to come. */
static enum qkv_status begin_set(struct qkv_error *err, struct qkv_waiting *waiting)
{
    struct seq_array used_up = waiting->set;
    drop_removed(&waiting->arrivals);
    QKV_TRY(sort_seqs(err, waiting->arrivals.seqs, waiting->arrivals.n));
    waiting->set = waiting->arrivals;
    waiting->set_head = 0;
    waiting->arrivals = used_up;
    waiting->arrivals.n = 0;
    return QKV_OK;
}

static struct qkv_seq *first_from(const struct seq_array *array, size_t from)
{
    while (from < array->n && array->seqs[from] == NULL) {
        from++;
    }
    return from < array->n ? array->seqs[from] : NULL;
}

enum qkv_status qkv_waiting_first(struct qkv_error *err, struct qkv_waiting *waiting,
                                  struct qkv_seq **out)
{
    if (waiting->set.n_there == 0 && waiting->arrivals.n_there > 0) {
        QKV_TRY(begin_set(err, waiting));
    }
    struct qkv_seq *first = first_from(&waiting->set, waiting->set_head);
    waiting->set_head = first != NULL ? (size_t)first->slot : waiting->set.n;
    *out = waiting->front != NULL ? waiting->front : first;
    return QKV_OK;
}

struct qkv_seq *qkv_waiting_next(const struct qkv_waiting *waiting, const struct qkv_seq *seq)
{
    if (seq->slot < 0 && seq->next != NULL) {
        return seq->next;
    }
    return first_from(&waiting->set, seq->slot < 0 ? waiting->set_head : (size_t)seq->slot + 1);
}

static enum qkv_status check_array(struct qkv_error *err, const struct seq_array *array,
                                   const char *name)
{
    size_t n_there = 0;
    for (size_t i = 0; i < array->n; i++) {
        const struct qkv_seq *seq = array->seqs[i];
        if (seq == NULL) {
            continue;
        }
        n_there++;
        if (seq->slot != (int64_t)i || seq->state != QKV_SEQ_WAITING) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "waiting %s: sequence %lld at %zu has slot %lld, state %d", name,
                            (long long)seq->id, i, (long long)seq->slot, (int)seq->state);
        }
    }
    if (n_there != array->n_there) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "waiting %s: %zu counted, %zu there", name,
                        array->n_there, n_there);
    }
    return QKV_OK;
}

enum qkv_status qkv_waiting_check(struct qkv_error *err, const struct qkv_waiting *waiting)
{
    int64_t n_listed = 0;
    const struct qkv_seq *last = NULL;
    for (const struct qkv_seq *seq = waiting->front; seq != NULL; seq = seq->next) {
        if (++n_listed > waiting->n_listed || seq->prev != last || seq->slot != -1 ||
            seq->state != QKV_SEQ_WAITING) {
            return qkv_fail(err, QKV_ERR_INTERNAL,
                            "waiting list: sequence %lld at %lld of %lld, slot %lld, state %d",
                            (long long)seq->id, (long long)n_listed, (long long)waiting->n_listed,
                            (long long)seq->slot, (int)seq->state);
        }
        last = seq;
    }
    if (n_listed != waiting->n_listed || last != waiting->back) {
        return qkv_fail(err, QKV_ERR_INTERNAL, "waiting list: %lld counted, %lld there",
                        (long long)waiting->n_listed, (long long)n_listed);
    }
    QKV_TRY(check_array(err, &waiting->set, "set"));
    QKV_TRY(check_array(err, &waiting->arrivals, "arrivals"));
    const struct qkv_seq *before = NULL;
    for (size_t i = 0; i < waiting->set.n; i++) {
        const struct qkv_seq *seq = waiting->set.seqs[i];
        if (seq == NULL) {
            continue;
        }
        if (i < waiting->set_head) {
            return qkv_fail(err, QKV_ERR_INTERNAL, "waiting set: %zu is before its head %zu", i,
                            waiting->set_head);
        }
        if (before != NULL) {
            int32_t at = count_same(before, seq, 0);
            int32_t a = token_at(before, at);
            int32_t b = token_at(seq, at);
            if (a > b || (a == b && before->order >= seq->order)) {
                return qkv_fail(err, QKV_ERR_INTERNAL, "waiting set: sequence %lld before %lld",
                                (long long)before->id, (long long)seq->id);
            }
        }
        before = seq;
    }
    return QKV_OK;
}
