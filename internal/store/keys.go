// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"net/url"
	"strings"
)

// The keys below the prefix of a fleet. Names of services and servers are escaped as in the path of
// a URL (RFC 3986, section 2.1). So a key never has a line break, which etcd's tools would print.
const (
	headKey    = "head"    // the last change (head)
	releaseKey = "release" // the change that balancers follow (release)
	writerKey  = "writer"  // exists while a change of many keys is being written
	leaderKey  = "leader"  // the balancer that makes generations

	servicesKey    = "services/"    // SERVICE: the fields of a service, without its servers
	serversKey     = "servers/"     // SERVICE/SERVER: the fields of a server
	overridesKey   = "overrides/"   // SERVICE, or SERVICE/SERVER: the override of a service or server
	generationsKey = "generations/" // SERVICE: the numbers and sets of servers of a service
	setsKey        = "sets/"        // ID/PIECE: a part of a set of servers
)

// keyOf returns the key of a service, or of a server of a service, in one of the trees.
func keyOf(tree, service string, server ...string) string {
	key := tree + url.PathEscape(service)
	for _, name := range server {
		key += "/" + url.PathEscape(name)
	}
	return key
}

// namesOf returns the names with which keyOf has made a key. For the key of a service, the name of
// the server is empty.
func namesOf(tree, key string) (service, server string, err error) {
	escapedService, escapedServer, isServer := strings.Cut(strings.TrimPrefix(key, tree), "/")
	service, err = url.PathUnescape(escapedService)
	if err == nil && isServer {
		server, err = url.PathUnescape(escapedServer)
	}
	mustBeServer := tree == serversKey
	mayBeServer := mustBeServer || tree == overridesKey // an override may be of either
	switch {
	case err != nil:
		return "", "", fmt.Errorf("key %s: %w", key, err)
	case service == "" || isServer && server == "":
		return "", "", fmt.Errorf("key %s: has an empty name", key)
	case mustBeServer && !isServer, isServer && !mayBeServer:
		return "", "", fmt.Errorf("key %s: names a server where a service belongs, or the reverse", key)
	}
	return service, server, nil
}

// treeOf returns the tree of a key whose value is an item. For other keys it returns an empty
// string.
func treeOf(key string) string {
	for _, tree := range []string{servicesKey, serversKey, overridesKey, generationsKey} {
		if strings.HasPrefix(key, tree) {
			return tree
		}
	}
	return ""
}
