// Command pod is the one program of the node's own test image:
//
//	pod pause             waits until it is stopped, and reaps orphans: the sandbox of every pod
//	pod serve ADDRESS     answers each HTTP request with its user, its capabilities and its limits
//	pod get URL           prints status and body; exits with 1 if there is no answer within 3 seconds
//	pod eat MEBIBYTES     touches that much memory, and waits
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	command, argument := "pause", ""
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	if len(os.Args) > 2 {
		argument = os.Args[2]
	}
	var err error
	switch command {
	case "pause":
		pause()
	case "serve":
		err = serve(argument)
	case "get":
		err = get(argument)
	case "eat":
		err = eat(argument)
	default:
		err = fmt.Errorf("unknown command %q", command)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pod:", err)
		os.Exit(1)
	}
}

func pause() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}

func serve(address string) error {
	fmt.Println("serving", address)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		os.Exit(0)
	}()
	return http.ListenAndServe(address, http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(answer, report())
	}))
}

// report says who this process is, in the words of /proc/self/status, and whether it may write to its root.
func report() string {
	status, _ := os.ReadFile("/proc/self/status")
	lines := []string{fmt.Sprintf("uid: %d", os.Getuid())}
	for _, line := range strings.Split(string(status), "\n") {
		for _, wanted := range []string{"CapEff:", "NoNewPrivs:", "Seccomp:"} {
			if strings.HasPrefix(line, wanted) {
				lines = append(lines, strings.Join(strings.Fields(line), " "))
			}
		}
	}
	if err := os.WriteFile("/written", nil, 0o600); err != nil {
		lines = append(lines, "write: "+err.Error())
	} else {
		lines = append(lines, "write: allowed")
	}
	return strings.Join(lines, "\n") + "\n"
}

func get(url string) error {
	client := http.Client{Timeout: 3 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 1<<16))
	fmt.Printf("%d %s", answer.StatusCode, body)
	return err
}

func eat(mebibytes string) error {
	count, err := strconv.Atoi(mebibytes)
	if err != nil {
		return err
	}
	var eaten [][]byte
	for range count {
		block := make([]byte, 1<<20)
		for at := 0; at < len(block); at += 4096 {
			block[at] = 1
		}
		eaten = append(eaten, block)
	}
	fmt.Println("ate", len(eaten), "MiB")
	pause()
	return nil
}
