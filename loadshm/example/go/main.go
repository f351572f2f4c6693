// SPDX-License-Identifier: Apache-2.0

// Command go is an HTTP server that takes uploads and reports how many it is busy with.
//
//	go run ./loadshm/example/go /run/shop/load 8
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"

	"github.com/segue-lb/segue/loadshm"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: go FILE CAPACITY")
	}
	capacity, err := strconv.ParseUint(os.Args[2], 10, 32)
	if err != nil {
		log.Fatal(err)
	}
	load, err := loadshm.Open(os.Args[1], uint32(capacity))
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.Serve(listener, counted(load, http.HandlerFunc(upload))))
}

// counted reports a request as busy as long as the handler works on it.
func counted(load *loadshm.Reporter, handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		load.Begin()
		defer load.End()
		handler.ServeHTTP(w, r)
	})
}

func upload(w http.ResponseWriter, r *http.Request) {
	n, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	fmt.Fprintf(w, "%d bytes\n", n)
}
