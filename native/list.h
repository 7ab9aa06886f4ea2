/* Doubly linked lists through a node inside the element. A node that is in no list points to itself. */
#ifndef ZP_LIST_H
#define ZP_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct zp__list {
	struct zp__list *next, *previous;
} zp__list;

/* The element of `type` whose `member` is the node `pointer`. */
#define ZP__ELEMENT(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* Walks a list; the body may remove `node`. */
#define ZP__EACH(node, list)                                                                                           \
	for (zp__list *node = (list)->next, *node##_next = node->next; node != (list);                                 \
	     node = node##_next, node##_next = node->next)

static inline void zp__list_init(zp__list *list)
{
	list->next = list->previous = list;
}

static inline bool zp__list_empty(const zp__list *list)
{
	return list->next == list;
}

static inline void zp__list_append(zp__list *list, zp__list *node)
{
	node->previous = list->previous;
	node->next = list;
	list->previous->next = node;
	list->previous = node;
}

static inline void zp__list_remove(zp__list *node)
{
	node->previous->next = node->next;
	node->next->previous = node->previous;
	zp__list_init(node);
}

#endif
